"""fastbert: pre-train, fine-tune and run BERT without computing pad tokens.

Importing this package loads torch, but neither Triton nor any optional library.
"""

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.config import SIZES, BertConfig
from fastbert.errors import UserError
from fastbert.heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.modeling import BertForPreTraining, BertModel, LossParts
from fastbert.optim import AdamW, Lamb

__version__ = "0.1.0"

__all__ = [
    "IGNORE_INDEX",
    "SIZES",
    "AdamW",
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "Lamb",
    "LossParts",
    "PackedBatch",
    "PaddedBatch",
    "UserError",
]
