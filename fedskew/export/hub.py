"""Upload an exported model to the Hugging Face Hub. It needs the extra [hub]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedskew.errors import UserError
from fedskew.export.folder import Exported


def check_upload(name: str) -> None:
    """Refuse an upload that cannot work: without huggingface_hub, without a token, or to a name that is not valid."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        raise UserError("--hub needs huggingface_hub: pip install 'fedskew[hub]'") from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--hub is {name!r}; expected OWNER/NAME: {error}") from error
    if "/" not in name:
        raise UserError(f"--hub is {name!r}; expected OWNER/NAME, with your user name or an organisation as OWNER")
    if get_token() is None:
        raise UserError(
            "the Hugging Face Hub needs a token with the right to write; set HF_TOKEN, or run `hf auth login`"
        )


def upload(exported: Exported, name: str, private: bool = False) -> str:
    """Upload the files of an exported model as one commit to the repository OWNER/NAME. Return the repository's URL.

    The repository is created if it does not exist. A new repository is public, unless `private` is set or the
    organisation's default is private. With `private`, an existing public repository is refused.
    """
    check_upload(name)
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    files = [CommitOperationAdd(path, str(exported.folder / path)) for path in exported.files]
    with _hub_errors(name, hub.endpoint):
        address = hub.create_repo(name, private=private or None, exist_ok=True)
        if private and not hub.repo_info(name).private:
            raise UserError(f"{name} exists on the Hub and is public; make it private there, or choose another name")
        hub.create_commit(name, files, commit_message="Model exported by fedskew")
    return str(address)


@contextmanager
def _hub_errors(name: str, endpoint: str) -> Iterator[None]:
    """Report errors of the Hub and of the connection to it in one line."""
    from huggingface_hub.errors import HfHubHTTPError

    transport_error: type[Exception] = HfHubHTTPError.__mro__[1]  # HTTPError of httpx or, in newer versions, of httpx2
    try:
        yield
    except (transport_error, OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise UserError(_explain(cause, name, endpoint)) from error


def _explain(error: BaseException, name: str, endpoint: str) -> str:
    response: Any = getattr(error, "response", None)
    if response is None:  # the Hub was not reached, or it refused the model card
        return f"cannot upload {name} to {endpoint}: {error or type(error).__name__}"
    said = getattr(error, "server_message", None) or f"status {response.status_code}"
    if response.status_code == 401:
        return f"{endpoint} does not accept the token ({said}); set HF_TOKEN to a valid one, or run `hf auth login`"
    if response.status_code == 403:
        return f"the token has no right to write to {name} ({said}); expected a token with that right, or another name"
    return f"{endpoint} refused the upload to {name}: {said}"
