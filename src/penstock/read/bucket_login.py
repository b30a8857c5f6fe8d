"""Whose buckets these are: services and credentials, from the user's environment.

In:    the address of a bucket, and the environment.
Out:   which service it means here, and what its store needs to be let in.
Where: whichever thread opens a store.
State: none.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from penstock.config import environment

LOGIN = {
    "s": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; if public AWS_SKIP_SIGNATURE=true.",
    "g": "Set GOOGLE_APPLICATION_CREDENTIALS or run `gcloud auth application-default login`; if public "
    "GOOGLE_SKIP_SIGNATURE=true.",
    "a": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login` and "
    "set AZURE_USE_AZURE_CLI=true; if public AZURE_SKIP_SIGNATURE=true.",
}
NATIVE = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
"""What obstore itself makes credentials of, or needs none with."""


def endpoint_of(root: str) -> str:
    """The service that the environment names, if it does."""
    names = {
        "s": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "g": ("GOOGLE_BASE_URL",),
        "a": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    found = environment()
    if root[0] == "a" and found.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true"):
        return "http://127.0.0.1:10000"
    return next((found[name] for name in names[root[0]] if found.get(name)), "")


def s3_credentials() -> dict[str, Any]:
    """Nothing where the environment has some for obstore to find: keys, or the role of a container.

    Else boto3 is asked where it is installed: it knows profiles, SSO and the roles of machines. Where it
    has none either, requests are not signed: public buckets can be read, and others refuse at once.
    obstore would wait for the role of a machine that has none.
    """
    if any(environment().get(name) for name in NATIVE) or importlib.util.find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # boto3 knows none
        return {"skip_signature": True}


def azure_account() -> dict[str, Any]:
    """What the `az` tool calls otherwise than obstore does."""
    found = environment()
    names = {"AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key"}
    given = {ours: found[name] for name, ours in names.items() if found.get(name)}
    parts = (
        part.partition("=") for part in found.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    )
    words = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
    }
    return {words[name]: value for name, _, value in parts if name in words} | given
