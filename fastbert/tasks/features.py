"""Feature-based tagging: the body stays as it is, and a BiLSTM learns on its last four layers.

BERT (Devlin et al. 2019), section 5.3: the last four hidden layers, concatenated, go without fine-tuning into
a randomly initialised two-layer BiLSTM of 768 before the classifier. The paper's best without fine-tuning
(96.1 dev F1 on CoNLL-2003 against 96.4 with it). The body is run once on each sentence, not once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.errors import UserError
from fastbert.modeling import BertModel, HeadedModel
from fastbert.pretrained import PretrainedModel
from fastbert.tasks.tag import TagTask, Words, word_places
from fastbert.tasks.task import Batch, Feature, token_rows

NUM_LAYERS = 4  # of the body that are concatenated


class BertLstmForTokenClassification(HeadedModel):
    """A frozen BERT, and a two-layer BiLSTM with a classifier on its last four layers.

    Not a class of transformers: `python -m fastbert.predict` and `from_pretrained` read what it saves.
    """

    lstm_size: ClassVar[int] = 768  # of each direction

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        if config.num_hidden_layers < NUM_LAYERS:
            raise UserError(
                f"features are the last {NUM_LAYERS} layers, and the model has {config.num_hidden_layers}; "
                "take a deeper one"
            )
        self.bert = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        self.lstm = nn.LSTM(
            NUM_LAYERS * config.hidden_size,
            self.lstm_size,
            num_layers=2,
            bidirectional=True,
            batch_first=True,
            dropout=config.hidden_dropout_prob,
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(2 * self.lstm_size, config.num_labels)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module, names: Iterable[str] = ("weight", "bias")) -> None:
        if not isinstance(module, nn.LSTM):
            return super()._init_weights(module, names)
        bound = 1 / math.sqrt(module.hidden_size)  # torch's own
        for name, parameter in module.named_parameters():
            if name in names or name.partition("_")[0] in names:
                parameter.uniform_(-bound, bound)

    def train(self, mode: bool = True) -> BertLstmForTokenClassification:
        """The body stays in evaluation mode: its features are the same every time."""
        super().train(mode)
        self.bert.eval()
        return self

    @torch.no_grad()
    def features(self, batch: Batch, places: Tensor) -> Tensor:
        """[words, 4 H]: the last four layers at these rows of the batch's tokens (padding not counted)."""
        inputs: tuple[Any, ...] = (batch,)
        if not isinstance(batch, PackedBatch):
            inputs = (batch.input_ids, batch.attention_mask, batch.token_type_ids)
        layers = self.bert(*inputs, output_hidden_states=True).hidden_states[-NUM_LAYERS:]
        return torch.cat([token_rows(states, batch).index_select(0, places) for states in layers], dim=-1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Sentences [words, 4 H] -> logits [words of all, num_labels]."""
        filled = [sentence for sentence in features if len(sentence)]
        if not filled:
            return self.classifier.weight.new_zeros(0, self.config.num_labels)
        packed = pack_sequence(filled, enforce_sorted=False)
        hidden, lengths = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        is_word = torch.arange(hidden.shape[1]) < lengths[:, None]
        logits: Tensor = self.classifier(self.dropout(hidden[is_word.to(hidden.device)]))
        return logits


class FeatureTask(TagTask):
    """Tagging with a body that is not trained.

    The features of a sentence are kept beside it from its first batch on: 16 H bytes a word in fp32, so 12 kB
    with a base model.
    """

    name: ClassVar[str] = "features"
    default_lr: ClassVar[float] = 1e-3  # everything that learns is new
    model_class: ClassVar[type[PretrainedModel]] = BertLstmForTokenClassification

    def word_logits(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        assert isinstance(model, BertLstmForTokenClassification)
        sentences = [feature for feature in features if isinstance(feature, Words)]
        if any(sentence.hidden is None for sentence in sentences):
            rows = model.features(batch, word_places(sentences).to(model.device)).cpu()
            lengths = [len(sentence.first_pieces) for sentence in sentences]
            for sentence, part in zip(sentences, rows.split(lengths)):
                sentence.hidden = part.clone()
        logits: Tensor = model([s.hidden.to(model.device) for s in sentences if s.hidden is not None])
        return logits
