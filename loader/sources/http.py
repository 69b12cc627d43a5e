"""Models behind plain HTTP: no listing, so the files are found by their usual names and by the index."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import IO, Any
from urllib.parse import quote, urlsplit, urlunsplit

from loader.errors import CheckpointError
from loader.known_hashes import MANIFEST_NAME
from loader.sources.remote import (
    RemoteFile,
    RemoteModel,
    choose_files,
    gguf_names,
    last_part,
    read_small_remote,
)

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0
_USUAL_NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("quantize_config.json", "adapter_config.json", "SHA256SUMS", "model.safetensors.index.json", "model.safetensors"),
    *("adapter_model.safetensors", MANIFEST_NAME),
)
_GONE = (404, 410)
_REFUSED = (401, 403)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP alone, and takes no credentials to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("https", old.scheme):
            raise urllib.error.HTTPError(newurl, code, f"leads from {old.scheme} to {new.scheme}", headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and new.netloc != old.netloc:
            request.remove_header("Authorization")
        return request


@dataclass(frozen=True, slots=True)
class HttpReader:
    """Reads files below `base` (without a final slash); `headers` go with each request to that host."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: str = ""

    def find(self, name: str) -> RemoteFile | None:
        """Size and version of a file; None when it is not there. Raises CheckpointError and OSError."""
        response = self._open(name, "HEAD", {})
        if response is None:
            return None
        with response:
            length = response.headers.get("Content-Length", "")
            if not length.isdigit():
                text = f"{self.base}/{name}: the server does not tell its size"
                raise CheckpointError("unsupported", text, "download the model and pass its folder")
            return RemoteFile(name, int(length), _version(response.headers))

    def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """See `Reader`. A server that cannot begin in the middle costs the bytes before it again."""
        response = self._open(file.name, "GET", {"Range": f"bytes={start}-"} if start else {})
        if response is None:
            raise CheckpointError("not_found", f"{self.base}/{file.name} does not exist", "check the address")
        with response:
            found = _version(response.headers)
            if file.version and found and found != file.version:
                raise CheckpointError("invalid", f"{self.base}/{file.name} changed while it was read", "start again")
            rest = 0 if response.status == 206 else start
            while part := _read(response, min(CHUNK_BYTES, rest) if rest else CHUNK_BYTES):
                if rest:
                    rest -= len(part)
                else:
                    yield part

    def _open(self, name: str, method: str, headers: Mapping[str, str]) -> HTTPResponse | None:
        """The answer; None for what is not there. Raises CheckpointError for what is refused, OSError."""
        url = f"{self.base}/{quote(name)}"
        request = urllib.request.Request(url + self.query, method=method, headers={**self.headers, **headers})
        try:
            response: HTTPResponse = urllib.request.build_opener(_Redirects()).open(request, timeout=TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _GONE:
                return None
            if error.code in _REFUSED:
                text = f"{url} refuses access (HTTP {error.code})"
                raise CheckpointError("unavailable", text, "check the address and your credentials for it") from error
            raise
        except HTTPException as error:
            raise ConnectionError(f"the server does not speak HTTP: {error!r}") from error


def _read(response: HTTPResponse, num_bytes: int) -> bytes:
    try:
        return response.read1(num_bytes)  # what has arrived, so that nothing is lost when this process ends
    except HTTPException as error:
        raise ConnectionError(f"the answer broke off: {error!r}") from error


def http_model(url: str) -> RemoteModel:
    """The model at an http or https URL: a folder of safetensors, or one GGUF file.

    Raises CheckpointError, "unavailable" when the server cannot be reached.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise CheckpointError(
            "unsupported", "credentials in a URL are not supported", "download the model and pass its folder"
        )
    query = f"?{parts.query}" if parts.query else ""
    clean = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    try:
        if clean.endswith(".gguf"):
            base, _, name = clean.rpartition("/")
            reader = HttpReader(base, query=query)
            parts_of = [_present(reader, part, "check the address") for part in gguf_names(name)]
            return RemoteModel(clean, last_part(clean), parts_of, reader)
        reader = HttpReader(clean, query=query)
        found = {file.name: file for file in map(reader.find, _USUAL_NAMES) if file is not None}
        files = choose_files(
            clean,
            found,
            lambda file: read_small_remote(reader, file),
            find=lambda name: _present(reader, name, "check the source: its index names it"),
        )
    except OSError as error:
        raise CheckpointError(
            "unavailable", f"{clean} cannot be reached: {_reason(error)}", "check the network and the address"
        ) from error
    return RemoteModel(clean, last_part(clean), files, reader)


def _present(reader: HttpReader, name: str, remedy: str) -> RemoteFile:
    file = reader.find(name)
    if file is None:
        raise CheckpointError("not_found", f"{reader.base}/{name} does not exist", remedy)
    return file


def _version(headers: Message) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)
