"""Rows of a dataset file, checked. JSONL and Parquet in, `Row` out; the first fault is one RecipeError that names its place.

    {"prompt": …, "ground_truth": …, "data_source": …, anything else}  ->  Row(prompt, ground_truth, data_source, extra_json)

Column names come from the recipe's [data]; a dotted name ("reward_model.ground_truth") reaches into objects unless a
column is literally called so.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stretto.errors import RecipeError
from stretto.recipe import Data

Message: TypeAlias = dict[str, Any]
"""{"role": …, "content": …} and whatever else the chat template reads."""

DEFAULT_SOURCE = "default"
"""data_source of rows that name none, when the recipe does not ask for a column of its own."""
PARQUET_BATCH_ROWS = 1024
"""Rows converted at once; bounds memory."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row."""

    where: str
    """Its place for people: "line 17"."""
    number: int
    """0-based place in the file, blank lines not counted."""
    prompt: str | list[Message]
    ground_truth: str
    data_source: str
    extra_json: str
    """Every other column, one JSON object."""

    @property
    def text(self) -> str:
        """The prompt as people read it."""
        return self.prompt if isinstance(self.prompt, str) else last_user_turn(self.prompt)


class _FaultError(Exception):
    """(column, rule) a row breaks."""


def read(path: Path, columns: Data, key: str) -> Iterator[Row]:
    """All rows in file order. `key` is the recipe's name for the file ("data.train"). Raises RecipeError."""
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {".jsonl": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise RecipeError(f"{key} = '{path}': the name must end in {' or '.join(readers)}")
    try:
        for number, (where, raw) in enumerate(reader(path)):
            try:
                yield _row(where, number, raw, columns)
            except _FaultError as fault:
                column, rule = fault.args
                raise RecipeError(f"{path}, {where}: {f'column {column!r} ' if column else ''}{rule}") from None
    except FileNotFoundError:
        raise RecipeError(f"{key} = '{path}': there is no such file") from None
    except OSError as err:
        raise RecipeError(f"{key} = '{path}': cannot be read: {err}") from None


def check_messages(value: Any) -> list[Message]:
    """A conversation for the chat template, without empty fields. Raises ValueError with the broken rule."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be text or a list of messages, not {_brief(value)}")
    messages: list[Message] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} must be an object with role and content, not {_brief(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"message {i} must have {name} as text, not {_brief(message.get(name))}")
        messages.append({k: v for k, v in message.items() if v is not None})  # Parquet fills absent fields with nulls
    return messages


def last_user_turn(messages: Sequence[Message]) -> str:
    """What people call the prompt of a conversation."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])


# ------------------------------------------------------------------------------------------------ files


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            where = f"line {line_number}"
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            try:
                yield where, json.loads(text)
            except UnicodeDecodeError as err:
                raise RecipeError(f"{path}, {where}: not UTF-8 at byte {err.start}") from None
            except json.JSONDecodeError as err:
                raise RecipeError(f"{path}, {where}: not JSON: {err.msg} at column {err.colno}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        first = 0
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            for i, raw in enumerate(batch.to_pylist()):
                yield f"row {first + i + 1} of {file.metadata.num_rows}", raw
            first += batch.num_rows
    except pyarrow.ArrowException as err:
        raise RecipeError(f"{path}: not a readable Parquet file: {err}") from None


# ------------------------------------------------------------------------------------------------ one row


def _row(where: str, number: int, raw: Any, columns: Data) -> Row:
    if not isinstance(raw, dict):
        raise _FaultError("", f"must be a JSON object, not {_brief(raw)}")
    prompt = _required(raw, columns.prompt_column, "data.prompt_column")
    if not isinstance(prompt, str):
        try:
            prompt = check_messages(prompt)
        except ValueError as err:
            raise _FaultError(columns.prompt_column, str(err)) from None
    elif not prompt:
        raise _FaultError(columns.prompt_column, "is empty")
    used = {columns.prompt_column, columns.answer_column, columns.source_column}
    row = Row(
        where=where,
        number=number,
        prompt=prompt,
        ground_truth=_as_text(columns.answer_column, _required(raw, columns.answer_column, "data.answer_column")),
        data_source=_source(raw, columns.source_column),
        extra_json=as_json({k: v for k, v in raw.items() if k not in used}),
    )
    _check_unicode(row)
    return row


def _check_unicode(row: Row) -> None:
    """JSON can spell half a surrogate pair, which no UTF-8 message carries."""
    for name in ("prompt", "ground_truth", "data_source", "extra_json"):
        value = getattr(row, name)
        try:
            (value if isinstance(value, str) else as_json(value)).encode()
        except UnicodeEncodeError as err:
            raise _FaultError("", f"{name} holds a lone surrogate, {err.object[err.start]!r}, which is no character") from None


def _source(raw: Mapping[str, Any], column: str) -> str:
    value = _get(raw, column)
    is_default = column == Data.model_fields["source_column"].default
    if value is None or (value is _ABSENT and is_default):
        return DEFAULT_SOURCE
    return _as_text(column, _required(raw, column, "data.source_column"))


def _required(raw: Mapping[str, Any], column: str, key: str) -> Any:
    value = _get(raw, column)
    if value is _ABSENT:
        near = difflib.get_close_matches(column, list(raw), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise _FaultError(column, f"is missing ({key}); the row has {', '.join(map(repr, raw)) or 'no column'}{hint}")
    if value is None:
        raise _FaultError(column, "is null")
    return value


def _get(raw: Mapping[str, Any], column: str) -> Any:
    if column in raw:
        return raw[column]
    value: Any = raw
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _as_text(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise _FaultError(column, f"is {value}, which is not a value")
    if isinstance(value, dict | list):
        return as_json(value)
    return str(value)


def as_json(value: Any) -> str:
    """JSON that any language reads: NaN and infinities become null, what JSON cannot say (dates, bytes) becomes text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
