"""Upload of an exported model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from m6.errors import UserError


def check_push(name: str) -> None:
    """Checks the name, the network and the token of an upload, before the export.

    Raises:
        UserError: one of them is missing or invalid.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name!r}: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"--push {name}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave out --push"
        )
    if get_token() is None:
        raise UserError(f'--push {name}: no token for the Hub; run "hf auth login", or set HF_TOKEN')


def push(folder: Path, name: str) -> str:
    """Uploads an exported model; the repository is made private if it does not exist.

    Args:
        folder: written by ``export_hf``.
        name: of the repository, such as ``user/model``.

    Returns:
        the address of the upload.

    Raises:
        UserError: the Hub cannot be reached, or refuses; the folder stays and can be uploaded later.
    """
    check_push(name)
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}")
    except (HTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--push {name}: {reason[0]}; the model is in {folder}: hf upload {name} {folder}") from None
    return commit.commit_url
