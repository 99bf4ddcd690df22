"""Rotary positions in config.json <--> rope_theta and rope_scaling of [model].

    config.json --> read_rope (this file) --> config.py          config.py --> written_rope (this file) --> config.json

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters`` with both in it. Either is
read, and where both are there they must agree; both are written. Pure: no files, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.rope_scaling import CONTEXT, ROPE_TYPES
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.architecture import Architecture, Problems

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", CONTEXT)
LAYERS = ("full_attention", "sliding_attention")
Scaling = dict[str, float | str | bool]


def read_rope(raw: Mapping[str, Any], kind: Architecture, problems: Problems, *, slides: bool) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_local_base_freq of [model], of whatever spelling.

    Args:
        slides: some layers do; of others there is no rope_local_base_freq.
    """
    if not kind.local_rope:
        theta, scaling = _rope(raw, kind, problems)
        return {"rope_theta": theta, "rope_scaling": scaling}
    by_layer = raw.get("rope_parameters") or {}
    if not isinstance(by_layer, dict) or not set(by_layer) <= set(LAYERS):
        problems.append(f"rope_parameters is {shortened(by_layer)}; it is a table with a table for each of {LAYERS}")
        by_layer = {}
    full, local = (by_layer.get(one) or {} for one in LAYERS)
    theta, scaling = _rope({**raw, "rope_parameters": full}, kind, problems)
    if scaling.get("truncate") is False:
        problems.append("truncate of rope_parameters is False; transformers takes it for True in tables by layer")
    plain, where = {"max_position_embeddings": raw.get("max_position_embeddings")}, f"rope_parameters of {LAYERS[1]}"
    local_theta = _local_theta(raw, kind, theta, problems)
    if local:
        found: list[str] = []
        given, sliding = _rope({**plain, "rope_parameters": {"rope_theta": local_theta, **local}}, kind, found)
        problems += [f"{where}: {problem}" for problem in found]
        if (given, sliding) == (theta, scaling):
            return {"rope_theta": theta, "rope_scaling": scaling}
        if sliding:
            problems.append(f"{where} is {shortened(local)}; it is of type default, or as of {LAYERS[0]}")
        if raw.get("rope_local_base_freq") is not None and given != local_theta:
            problems.append(f"{where} has rope_theta {given} and rope_local_base_freq is {local_theta}, which differ")
        local_theta = given
    plain_too = local_theta == theta and not scaling
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": local_theta if slides and not plain_too else 0.0,
    }


def refuse_by_layer(config: GPTConfig) -> None:
    """Refuse what transformers computes otherwise where positions are told by layer.

    Raises:
        ConfigError: yarn without ``truncate``, which it does not look for there.
    """
    if config.rope_scaling.get("truncate") is False:
        raise ConfigError(
            "model.rope_scaling.truncate is false; transformers takes it for true where layers that slide have "
            "positions of their own: leave it out, or sixfold-ckpt convert writes the tensors alone"
        )


def _local_theta(raw: Mapping[str, Any], kind: Architecture, theta: float, problems: Problems) -> float:
    """Of sliding layers, where no table says it."""
    given = _number(raw.get("rope_local_base_freq"))
    if given is not None:
        return given
    default = float(kind.defaults.get("rope_local_base_freq", kind.defaults["rope_theta"]))
    if "rope_local_base_freq" not in kind.defaults and theta != default and not raw.get("rope_parameters"):
        problems.append(
            f"rope_theta is {theta} without rope_parameters, which transformers 4 and 5 read otherwise for sliding "
            f"layers; write rope_parameters with a table for each of {LAYERS}"
        )
    return default


def _rope(raw: Mapping[str, Any], kind: Architecture, problems: Problems) -> tuple[float, Scaling]:
    """(theta, table of a type or {}): rope_scaling (4.x) and rope_parameters (5.x) must agree."""
    tables: dict[str, dict[str, Any]] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        table = raw.get(spelling) or {}
        if not isinstance(table, dict):
            problems.append(f"{spelling} is {table!r}; it is a table or null")
            table = {}
        if table:
            tables[spelling] = {key: value for key, value in table.items() if value is not None}
    outside = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    thetas = {f"{where}.rope_theta": table["rope_theta"] for where, table in tables.items() if "rope_theta" in table}
    thetas |= {"rope_theta": outside["rope_theta"]} if "rope_theta" in outside else {}
    if len(set(map(repr, map(_number, thetas.values())))) > 1:
        problems.append(" and ".join(f"{where} is {value!r}" for where, value in thetas.items()) + ", which differ")
    theta = _number(next(iter(thetas.values()), kind.defaults["rope_theta"]))
    if theta is None or theta <= 0:
        problems.append(f"rope_theta is {next(iter(thetas.values()))!r}; it is a number > 0")
    found = [_scaling(raw, kind, where, table, problems) for where, table in tables.items()]
    if len(found) == 2 and found[0] != found[1]:
        problems.append(
            f"rope_scaling is {raw['rope_scaling']} and rope_parameters {raw['rope_parameters']}: they differ"
        )
    if _number(outside.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor is {outside['partial_rotary_factor']!r}, and only 1.0 is supported")
    return theta or 1.0, found[0] if found else {}


def written_rope(config: GPTConfig, max_positions: int, *, by_layer: bool) -> dict[str, Any]:
    """Both spellings, and the longest row, which is no shorter than what the scaling is made for."""
    scaling: dict[str, Any] = dict(config.rope_scaling)
    if CONTEXT in scaling:
        scaling[CONTEXT] = int(scaling[CONTEXT])
        max_positions = max(max_positions, int(scaling[CONTEXT] * scaling["factor"]))
    parameters: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default", **scaling}
    if by_layer:
        local = config.rope_local_base_freq
        parameters = {
            LAYERS[0]: parameters,
            LAYERS[1]: {"rope_theta": local, "rope_type": "default"} if local else parameters,
        }
    return {
        "max_position_embeddings": max_positions,
        "rope_theta": config.rope_theta,
        "rope_parameters": parameters,
        "rope_scaling": scaling or None,
    }


def _scaling(
    raw: Mapping[str, Any], kind: Architecture, where: str, table: Mapping[str, Any], problems: Problems
) -> Scaling:
    names = {table[key] for key in ("rope_type", "type") if isinstance(table.get(key), str)} or {"default"}
    wrong = [repr(table[key]) for key in ("rope_type", "type") if not isinstance(table.get(key, ""), str)]
    wrong += sorted(repr(name) for name in names - {"default", *ROPE_TYPES})
    if wrong or len(names) > 1:
        said = " and ".join(wrong or sorted(map(repr, names)))
        known = ", ".join(map(repr, ("default", *ROPE_TYPES)))
        problems.append(f"{where} has rope_type {said}; it is one of {known}")
        return {}
    (name,) = names
    keys = ROPE_TYPES[name].keys if name in ROPE_TYPES else ()
    odd = sorted(set(table) - {"rope_theta", "rope_type", "type", "partial_rotary_factor", *keys})
    problems += [f"{where}.{key} is {shortened(table[key])}, which rope_type {name!r} does not have" for key in odd]
    if _number(table.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(
            f"{where}.partial_rotary_factor is {table['partial_rotary_factor']!r}, and only 1.0 is supported"
        )
    if name == "default":
        return {}
    # As transformers: a key beside the table comes first, and the longest row where nothing says it.
    longest = raw.get("max_position_embeddings", kind.defaults["max_position_embeddings"])
    given = {CONTEXT: longest, **table} | ({CONTEXT: raw[CONTEXT]} if raw.get(CONTEXT) is not None else {})
    scaling: Scaling = {"rope_type": name}
    for key in keys:
        if key not in ROPE_TYPES[name].needed and key not in given:
            continue
        if key in ROPE_TYPES[name].switches:
            value: float | bool | None = given[key] if isinstance(given[key], bool) else None
            rule = "true or false"
        else:
            number = _number(given.get(key))
            value, rule = number if number is not None and number > 0 else None, "a number > 0"
        if value is None:
            problems.append(f"{where}.{key} is {given.get(key)!r}; it is {rule}")
        else:
            scaling[key] = value
    return scaling


def shortened(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
