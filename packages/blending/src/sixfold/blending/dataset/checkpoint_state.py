"""What a checkpoint keeps of a dataset or blend: a position, and what the positions before it depend on.

    dataset --> stream_state --> JSON --> refuse_other_past (this file) --> the same position

The order has no state of its own, so loading changes nothing. It returns the position, and refuses a
past that is not the saved one. What comes after the position (later changes, sizes) may differ.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from sixfold.blending.blend.schedule import Schedule
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.config.order_names import order_named
from sixfold.blending.config.prefixes import base_name
from sixfold.blending.config.splits import Split
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import AbsentSource
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import plain, whole_number

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset

State = dict[str, Any]
STATE_VERSION = 3
_OLDEST = 1  # of release 0.1.0: other hashes of the data, and documents are shuffled in blocks
_WITHOUT_MEMBERS = 2  # its hashes say nothing of which sequences of a pair a part has, and of their ids
_SEGMENTS_IN_FULL = 4  # in full, the newest; of those before them a checksum, so that a state stays small


def stream_state(
    position: int,
    config: BlendedMegatronDatasetConfig,
    split: Split,
    schedule: Schedule,
    datasets: "Sequence[MegatronDataset]",
    version: int = STATE_VERSION,
) -> State:
    """The state of a stream at ``position``: JSON values only, 1 KB and 400 bytes per dataset at most."""
    position = whole_number("position", position, 0)
    segments = [segment for segment in schedule.segments if segment.begin < position]
    used = [any(segment.tree.quotas[number] for segment in segments) for number in range(len(datasets))]
    part = config.split_matrix[split.value] if config.split_matrix and not config.mock else None
    told = [
        {
            "begin": segment.begin,
            "sequence_length": segment.sequence_length,
            "quotas": {str(number): int(quota) for number, quota in enumerate(segment.tree.quotas) if quota},
        }
        for segment in segments
    ]
    earlier = told[:-_SEGMENTS_IN_FULL]
    drops = _drops_before(position, config, split)
    dropped_from = {name for _, name, *_ in drops.get("drops", [])}
    checksum = blake2b(json.dumps(earlier).encode(), digest_size=8).hexdigest()
    return {
        "state_version": version,
        "order": config.order,
        **({"packing": config.packing} if config.ordering.packs else {}),
        "position": position,
        "seed": int(config.random_seed),
        "part": split.name,
        "split": [0.0, 1.0] if part is None else list(part),
        "datasets": {
            str(number): _of_absent(dataset)
            if dataset.is_absent
            else {"name": dataset.name, "document_shuffle": dataset.document_shuffle}
            | config.ordering.state_of(dataset)
            | ({"drops_by": "view"} if dataset.part.view is not None and dataset.name in dropped_from else {})
            | _fingerprint(dataset.part, version)
            for number, dataset in enumerate(datasets)
            if used[number]
        },
        "earlier_segments": {"count": len(earlier), "hash": checksum} if earlier else None,
        "segments": told[-_SEGMENTS_IN_FULL:],
    } | drops


def _of_absent(dataset: "MegatronDataset") -> dict[str, Any]:
    """What the state of the run told of a dataset that was deleted since; its name alone where nothing was told."""
    source = dataset.indexed_dataset
    told = source.told if isinstance(source, AbsentSource) else None
    return {"name": dataset.name, "absent": True} if told is None else dict(told)


def _drops_before(position: int, config: BlendedMegatronDatasetConfig, split: Split) -> State:
    """Documents that earlier changes took out: how many, and a hash of their numbers. Nothing where there are none."""
    drops = [
        [
            change.at,
            config.name_of(prefix),
            len(ids),
            blake2b(json.dumps(list(ids)).encode(), digest_size=8).hexdigest(),
        ]
        for change in config.changes_of(split)
        if change.at < position
        for prefix, ids in (change.drop or {}).items()
    ]
    return {"drops": drops} if drops else {}


def told_of(state: State, name: str) -> dict[str, Any] | None:
    """What a state says of the data of a dataset, enough to stand for it when it is deleted."""
    datasets = state.get("datasets") if isinstance(state, dict) else None
    for told in datasets.values() if isinstance(datasets, dict) else ():
        if isinstance(told, dict) and told.get("name") == name and isinstance(told.get("tokens"), int):
            return dict(told)
    return None


def index_state(
    position: int,
    config: BlendedMegatronDatasetConfig,
    split: Split,
    datasets: "Sequence[MegatronDataset]",
    index: Mapping[str, Any],
    version: int = STATE_VERSION,
) -> State:
    """The state of an order that is made of indices; they are fixed as a whole, with their sizes.

    Args:
        index: what the indices depend on beside the datasets, JSON values.
    """
    position = whole_number("position", position, 0)
    state = {"state_version": version, "order": config.order, "position": position}
    if position == 0:  # nothing was given that could be given again
        return state
    return state | {
        "seed": int(config.random_seed),
        "part": split.name,
        "sequence_length": config.sequence_length,
        "index": dict(index),
        "datasets": {
            str(number): {"name": dataset.name, "samples": len(dataset)}
            | dataset.index_options
            | _fingerprint(dataset.part, version)
            for number, dataset in enumerate(datasets)
        },
    }


def _fingerprint(part: Part, version: int) -> dict[str, Any]:
    """What a state of this version tells of the data."""
    if version == _OLDEST:
        return part.fingerprint_of_0_1
    return part.fingerprint_of_state_2 if version == _WITHOUT_MEMBERS else part.fingerprint


def saved_position(state: State) -> tuple[int, int]:
    """(position, version) of a state.

    Raises:
        BlendingError: not a state, or one of a version that is not known here.
    """
    position = state.get("position") if isinstance(state, dict) else None
    if not isinstance(position, int | np.integer) or isinstance(position, bool) or position < 0:
        raise BlendingError("the state has no position; it is not what state_dict(position) returned")
    version = state.get("state_version")
    if not isinstance(version, int | np.integer) or not _OLDEST <= version <= STATE_VERSION:
        raise BlendingError(f"the state has version {version}; this release reads {_OLDEST} to {STATE_VERSION}")
    return int(position), int(version)


def refuse_other_past(saved: State, current: State, datasets: "Sequence[MegatronDataset]") -> None:
    """Compare a saved state with the one, of its version, that this stream has at the same position.

    Raises:
        BlendingError: the first thing that fixed earlier positions and differs: what it was, what it is.
    """
    if current["position"] == 0:  # nothing was given that could be given otherwise
        return
    saved, current = json.loads(json.dumps(saved, default=plain)), json.loads(json.dumps(current))
    if order_named(current["order"]).indexed:
        _forget_folders(saved, current)
    elif saved["state_version"] == _OLDEST and saved.get("order") == current["order"]:
        for dataset in saved.get("datasets", {}).values():
            dataset.setdefault("document_shuffle", "block")
    for number, now in current.get("datasets", {}).items():
        was = saved.get("datasets", {}).get(number, {})
        if "absent" in now or "absent" in was:  # deleted, before or after the state was saved: the name is all there is
            saved["datasets"][number], current["datasets"][number] = {"name": was.get("name")}, {"name": now["name"]}
        if was.get("ids") is None or now.get("ids") is None:  # a source without flat ids, such as one behind a URL
            was.pop("ids", None)
            now.pop("ids", None)
    for state in (saved, current):  # documents of several datasets go at one position in any order
        if "drops" in state:
            state["drops"] = sorted(state["drops"])
    difference = _first_difference("packing", saved.get("packing"), current.get("packing"))
    difference = difference or _first_difference("", saved, current)
    if difference is not None:
        where, was, now = difference
        raise BlendingError(
            f"the saved state does not fit: {where} was {was} and is {now}, and the {current['position']} positions "
            f"already read depend on it; {_remedy(where, saved, current, datasets)}"
        )


def _forget_folders(saved: State, current: State) -> None:
    """Release 0.1.0 took a whole path for the name; the orders with indices do not depend on names."""
    for number, now in current.get("datasets", {}).items():
        was = saved.get("datasets", {}).get(number, {})
        if isinstance(was.get("name"), str) and base_name(was["name"]) == now["name"]:
            was["name"] = now["name"]


def _remedy_of_drops(saved: State, current: State) -> str:
    was, now = (state.get("drops", []) for state in (saved, current))
    at, name, *_ = next(one for one in [*was, *now] if one not in was or one not in now)
    return (
        f"what the BlendChange at {at} takes down of {name!r} is another list than at the save: restore it; a further "
        f"BlendChange with a later position takes down more"
    )


def _remedy(where: str, saved: State, current: State, datasets: "Sequence[MegatronDataset]") -> str:
    if where.startswith("drops"):
        return _remedy_of_drops(saved, current)
    new = ", and say what is new with a BlendChange" if not order_named(current["order"]).indexed else ""
    if not (where.startswith("datasets.") and where.endswith((".name", ".document_shuffle"))):
        return f"restore it{new}"
    listed = _order_of_then(saved, datasets)
    if listed is not None:
        return f"the datasets were listed in another order: list them as {listed}, each with its weight"
    known = {dataset.name for dataset in datasets}
    names: dict[str | None, Any] = {}
    options: dict[str, None] = {}
    for number, was in saved.get("datasets", {}).items():
        now = current["datasets"].get(number, {})
        if was.get("name") != now.get("name") and int(number) < len(datasets) and was.get("name") not in known:
            names[datasets[int(number)].dataset_path] = was.get("name")
        if was.get("document_shuffle") != now.get("document_shuffle"):
            options[f'document_shuffle="{was.get("document_shuffle")}"'] = None
    if names:
        options[f"dataset_names={names}"] = None
    if not options:
        return "restore the list of datasets"
    return f"if it is the same data, {' and '.join(options)} in the config give the order of then"


def _order_of_then(saved: State, datasets: "Sequence[MegatronDataset]") -> list[str | None] | None:
    """The prefixes of the datasets in the order of a saved state; None where the order is not what differs."""
    by_name = {dataset.name: dataset for dataset in datasets}
    then = {int(number): was.get("name") for number, was in saved.get("datasets", {}).items()}
    if not set(then.values()) <= by_name.keys() or len(set(then.values())) < len(then):
        return None
    others = iter([dataset.name for dataset in datasets if dataset.name not in then.values()])
    listed = [then[number] if number in then else next(others, None) for number in range(len(datasets))]
    if None in listed or listed == [dataset.name for dataset in datasets]:
        return None
    return [by_name[str(name)].dataset_path for name in listed]


def _first_difference(where: str, was: Any, now: Any) -> tuple[str, str, str] | None:
    if isinstance(was, dict) and isinstance(now, dict):
        pairs = [(f"{where}.{key}".lstrip("."), was.get(key), now.get(key)) for key in dict.fromkeys([*was, *now])]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(f"{where}[{number}]", *pair) for number, pair in enumerate(zip(was, now, strict=True))]
    else:
        return None if was == now else (where, json.dumps(was), json.dumps(now))
    return next((found for pair in pairs if (found := _first_difference(*pair)) is not None), None)
