"""The tasks by name. Their modules are imported when one is asked for."""

from __future__ import annotations

import importlib

from fastbert.errors import UserError
from fastbert.tasks.task import Task

TASKS: dict[str, tuple[str, str]] = {  # name -> (module, class)
    "classify": ("fastbert.tasks.classify", "ClassifyTask"),
    "regress": ("fastbert.tasks.regress", "RegressTask"),
    "squad": ("fastbert.tasks.squad", "SquadTask"),
    "tag": ("fastbert.tasks.tag", "TagTask"),
    "features": ("fastbert.tasks.features", "FeatureTask"),
    "choice": ("fastbert.tasks.choice", "ChoiceTask"),
}


def task_class(name: str) -> type[Task]:
    """The class of a task; UserError that lists the names for an unknown one."""
    if name not in TASKS:
        raise UserError(f"{name!r} is not a task; the tasks are {', '.join(TASKS)}")
    module, class_name = TASKS[name]
    chosen: type[Task] = getattr(importlib.import_module(module), class_name)
    return chosen
