"""Where the files of a model come from: a local folder, a file in one, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# keyword arguments of `from_pretrained` that are huggingface_hub's
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_REPO_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass
class ModelFiles:
    """The files of one model in a local folder."""

    name: str
    folder: Path
    given: Path | None = None  # the user named this file (or TensorFlow checkpoint), not the folder

    def get(self, filename: str) -> Path | None:
        """Its local path, or None if the model has no such file."""
        path = self.folder / filename
        return path if path.is_file() else None

    def absent(self, filenames: tuple[str, ...]) -> OSError:
        """The error of a model that has none of these."""
        return OSError(f"Error no file named {', or '.join(filenames)}, found in directory {self.folder}")


@dataclass
class HubFiles(ModelFiles):
    """The files of a hub repository, fetched one by one into huggingface_hub's cache."""

    subfolder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    is_unreachable: bool = False

    def get(self, filename: str) -> Path | None:
        import huggingface_hub  # takes a while: only who asks the hub waits for it
        from huggingface_hub import errors

        try:
            path = huggingface_hub.hf_hub_download(
                self.name, filename, subfolder=self.subfolder or None, **self.options
            )
        except errors.LocalEntryNotFoundError:
            self.is_unreachable = True
            self.options["local_files_only"] = True  # the next files need not wait for the network again
            return None
        except errors.EntryNotFoundError:
            return None
        except (OSError, errors.HFValidationError) as error:  # its HTTP errors are OSErrors
            reason = str(error).strip().splitlines()
            raise OSError(
                f"{self.name} is neither a local folder nor a model that the hub gives out: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error
        self.folder = Path(path).parent
        # the other files come from the same commit, even if the branch moves meanwhile
        commit = re.search(r"snapshots[/\\]([0-9a-f]{40})[/\\]", str(path))
        if commit:
            self.options["revision"] = commit.group(1)
        return Path(path)

    def absent(self, filenames: tuple[str, ...]) -> OSError:
        names = ", or ".join(filenames)
        if self.is_unreachable:
            return OSError(
                f"{self.name} is no local folder, the hub cannot be reached, and its cache holds no {names}: "
                "check the name and the network, or give a local folder"
            )
        return OSError(f"the hub model {self.name} has no file named {names}")


def open_files(name: str | os.PathLike[str], options: dict[str, Any]) -> ModelFiles:
    """The files of a local folder, of the folder of a file, or of a hub id.

    Takes HUB_OPTIONS and `subfolder` out of `options`. OSError if the name is neither.
    """
    subfolder = options.pop("subfolder", None) or ""
    hub_options = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
    path = Path(name) / subfolder
    if path.is_dir():
        return ModelFiles(str(path), path)
    if path.is_file() or path.with_name(f"{path.name}.index").is_file():
        return ModelFiles(str(path), path.parent, path)
    if isinstance(name, str) and _REPO_ID.fullmatch(name) and not Path(name).exists():
        return HubFiles(name, Path(), subfolder=subfolder, options=hub_options)
    raise OSError(f"{path} does not exist: give a local model folder, a weights file or a hub id")


def local_folder(name: str | os.PathLike[str]) -> Path:
    """`name` itself if it exists or cannot be a hub id; else a local copy of the repository that it names.

    `ORG/NAME@REVISION` pins a commit, branch or tag. What model, tokenizer and sentence-transformers modules
    need, in huggingface_hub's cache. OSError if the hub gives nothing out under this name.
    """
    path = Path(name)
    repository, _, revision = str(name).partition("@")
    if path.exists() or repository.count("/") != 1 or not _REPO_ID.fullmatch(repository):
        return path
    import huggingface_hub
    from huggingface_hub import errors

    def fetch(weights: str) -> Path:
        patterns = ["*.json", "*.txt", f"{weights}*", f"*_Dense/{weights}*"]
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=patterns)
        )

    try:
        folder = fetch("*.safetensors")
        return folder if list(folder.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except (OSError, ValueError, errors.HFValidationError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(
            f"{name} is neither a local folder nor a model that the hub gives out: {reason[0]}"
        ) from error
