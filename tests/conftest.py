"""Real parts that tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto import embedded
from stretto.errors import NotFoundError


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedServer]:
    """One real server for the session, on a free port, with a password and an append-only file."""
    try:
        server = embedded.start(tmp_path_factory.mktemp("valkey"), program=os.environ.get("STRETTO_REDIS_SERVER"))
    except NotFoundError as err:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(err))
    yield server
    server.stop()


@pytest.fixture
def valkey(valkey_server: embedded.EmbeddedServer) -> embedded.EmbeddedServer:
    """The session's server, emptied. `valkey.url` is what a client connects to."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
        client.script_flush()
    return valkey_server


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token per byte: id = byte order of the byte-level alphabet; 256 = <eos>."""
    folder = tmp_path_factory.mktemp("byte-model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<eos>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
