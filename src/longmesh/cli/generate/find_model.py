"""Looks for a model before any rank starts: in a folder, in the hub's cache, else once at the hub itself.

Every rank would look on its own otherwise, and transformers tries again for a minute before it gives up.
"""

from __future__ import annotations

import os
from pathlib import Path

CONFIG = "config.json"
HUB_TIMEOUT_S = 5.0


def find_model_problem(name: str) -> str | None:
    """Why a model can't be loaded, in words; None if it seems to be there."""
    folder = Path(name)
    try:
        if folder.is_dir():
            has_config = (folder / CONFIG).is_file()
            return (
                None
                if has_config
                else f"there is no {CONFIG} in it; give a folder that save_pretrained wrote"
            )
        if folder.exists():
            return "it is a file; give the folder that it is in"
    except OSError as error:
        return f"it can't be read: {error.strerror}; give a folder or a name"
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1 or name.endswith(os.sep):
        return "no such folder" if folder.is_absolute() else f"no such folder (looked in {Path.cwd()})"
    return _find_hub_problem(name)


def _find_hub_problem(name: str) -> str | None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(name, CONFIG), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "no such folder, and a model's name on the hub is NAME or OWNER/NAME"
    except GatedRepoError:
        return "its owner must allow you to load it; see its page on the hub, then `hf auth login`"
    except RepositoryNotFoundError:
        return f"no such folder, and no model of this name at {constants.ENDPOINT}"
    except EntryNotFoundError:
        return f"there is no {CONFIG} at {constants.ENDPOINT}; give a model of transformers"
    except Exception as error:  # what it is depends on the hub library's version and its HTTP client
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"no such folder, it is not in the cache ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} can't be "
            f"reached ({reason[0]}); give a folder, or load it once where there is a network"
        )
    return None
