"""The shape of the repository: what importing costs, whose names are left alone, what the READMEs promise."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastbert

ROOT = Path(__file__).parents[1]
SET_UP = [
    "pip install -c constraints.txt -e . && python -m fastbert.pretrain --packed",
    "pip install -c constraints.txt -e '.[test]' && pytest",
]
# optional, slow to import, or only for commands
NOT_AT_IMPORT = [
    "triton",
    "transformers",
    "flash_attn",
    "apex",
    "matplotlib",
    "tensorboardX",
    "pyarrow",
    "huggingface_hub",
]

TRAINING_STEP = """
import torch
import fastbert
from fastbert import BertConfig, BertForPreTraining, Lamb, PackedBatch

torch.manual_seed(0)
config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=1,
                    intermediate_size=128, max_position_embeddings=16)
model = BertForPreTraining(config)
optimizer = Lamb(model.parameters(), lr=1e-2)
batch = PackedBatch(
    input_ids=torch.tensor([2, 7, 4, 3, 2, 9, 3]), token_type_ids=torch.zeros(7, dtype=torch.long),
    position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 2]), cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32),
    max_seqlen=4, masked_positions=torch.tensor([2]), masked_labels=torch.tensor([8]),
    next_sentence_labels=torch.tensor([0, 1]), num_tokens=7)
before = [p.detach().clone() for p in model.parameters()]
parts = model.loss_parts(batch)
(parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count).backward()
optimizer.step()
assert not optimizer.step_was_skipped
changed = sum(not torch.equal(p, b) for p, b in zip(model.parameters(), before))
assert changed == len(before), f"only {changed} of {len(before)} parameters moved"
"""


def run_python(code: str, *path: Path) -> str:
    """What `code` prints in a fresh interpreter with these folders first on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.anchor, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernel_files() -> list[Path]:
    files = sorted((ROOT / "kernels" / "fastbert_kernels").rglob("*.py"))
    assert files
    return files


def test_no_package_is_called_kernels() -> None:
    # it would shadow Hugging Face's `kernels`, which transformers imports
    assert (ROOT / "kernels" / "fastbert_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_importing_fastbert_loads_nothing_optional() -> None:
    code = f"import sys, fastbert; print(*[name for name in {NOT_AT_IMPORT} if name in sys.modules])"
    assert run_python(code, ROOT, ROOT / "kernels").split() == []


def test_unrelated_packages_of_optional_names_do_no_harm(tmp_path: Path) -> None:
    # PyPI's apex is a web toolkit: a package is recognised by what it has, not by its name
    for name in ("apex", "flash_attn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"NOTE = 'nothing of what {name} should have'\n")
    found = "import apex, flash_attn; assert apex.NOTE and flash_attn.NOTE\n"
    run_python(TRAINING_STEP + found, tmp_path, ROOT, ROOT / "kernels")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
def test_transformers_still_imports_beside_the_repository() -> None:
    code = "from transformers import BertModel; print(BertModel.__name__)"
    assert run_python(code, ROOT, ROOT / "kernels") == "BertModel\n"


@pytest.mark.parametrize("file", kernel_files(), ids=lambda f: f.name)
def test_kernels_import_torch_and_triton_only(file: Path) -> None:
    allowed = {"torch", "triton", "fastbert_kernels"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            assert module.split(".")[0] in allowed, f"line {node.lineno} imports {module}"


@pytest.mark.parametrize("file", kernel_files(), ids=lambda f: f.name)
def test_importing_kernels_only_defines(file: Path) -> None:
    definitions = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
    )  # fmt: skip
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_command = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        assert is_docstring or is_command or isinstance(node, definitions), (
            f"line {node.lineno} does something at import"
        )


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == fastbert.__version__
    assert project["name"] == "fastbert-triton", "PyPI's fastbert is someone else's"


def test_no_dependency_on_a_package_of_another_owner() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    names = {
        re.match(r"[\w-]+", requirement)[0].lower()  # type: ignore[index]
        for requirements in (project["dependencies"], *extras)
        for requirement in requirements
    }
    # the NVIDIA optimizers, this engine and its kernels are not what PyPI has under these names
    assert not names & {"apex", "fastbert", "kernels"}


def headings(markdown: str) -> list[str]:
    """The levels ("#", "##", ...) of a document's headings; code blocks have none."""
    without_code = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(#{1,6}) ", without_code, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_readme_has_the_two_set_up_commands(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for command in SET_UP:
        assert command in text, f"{name} does not have the line {command!r}"


def test_readmes_have_the_same_sections() -> None:
    english, korean = ((ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "README.ko.md"))
    assert headings(english) == headings(korean)
    assert headings(english), "no headings at all"
