"""Indices from the cache or built: where the pure functions of ``megatron`` meet the disk.

Part, identifiers --> index_order; weights --> blend_index (this file, through index_files.py) --> datasets
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sixfold.blending.blend.exact_counts import ApportionedBlend
from sixfold.blending.blend.index_arrays import BLEND_INDICES, BlendIndex, blend_fits, build_blend
from sixfold.blending.cache.file_names import Identifiers, describe, digest
from sixfold.blending.cache.index_files import Arrays, CacheEntry, known_files, load_or_build, stamps_of
from sixfold.blending.documents.idx_bin import pair_of
from sixfold.blending.documents.part import Part
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.document_index import EpochPlan
from sixfold.blending.megatron.index_order import INDICES, IndexOrder, build_indices, indices_fit, shapes_fit


def index_order(
    part: Part,
    plan: EpochPlan,
    *,
    seed: int,
    identifiers: Identifiers,
    facts: Mapping[str, Any],
    path_to_cache: str | None,
) -> IndexOrder:
    """The three indices of one part.

    Args:
        part, plan: what is built.
        seed: of the shuffles.
        identifiers: name the files.
        facts: what ``identifiers`` do not say of what the indices depend on.
        path_to_cache: None for ``PREFIX/cache/CLASS_indices``; data without a prefix then has no files.
    Raises:
        BlendingError: a folder that cannot be written to.
    """
    prefix, known = getattr(part.source, "path_prefix", None), known_files()
    folder = path_to_cache
    if not folder and prefix is not None:
        folder = f"{prefix}/cache/{identifiers['class']}_indices"
    if not folder:
        return IndexOrder(part, plan, build_indices(part, plan, seed))
    entry = CacheEntry(
        folder=folder,
        **_named(identifiers, identifiers["index_split"]),
        names=INDICES,
        facts=facts,
        sources=known.stamps or (None if prefix is None else stamps_of(pair_of(prefix))),
    )
    arrays = load_or_build(
        entry,
        lambda: build_indices(part, plan, seed),
        quick=lambda arrays: shapes_fit(arrays, part, plan),
        full=lambda arrays: indices_fit(arrays, part, plan),
        record=known.record,
    )
    return IndexOrder(part, plan, arrays)


def blend_index(
    weights: Sequence[float],
    size: int | None,
    sequence_length: int,
    *,
    identifiers: Identifiers,
    path_to_cache: str | None,
) -> BlendIndex:
    """The two indices of a blend; without ``path_to_cache`` they are built and not kept.

    Raises:
        BlendingError: weights of which no index can be built, or a folder that cannot be written to.
    """

    def build() -> Arrays:
        return dict(zip(BLEND_INDICES, build_blend(weights, size), strict=True))

    def fits(arrays: Arrays, full: bool) -> bool:
        return blend_fits(arrays, weights, size, full=full)

    if path_to_cache:
        entry = CacheEntry(
            folder=path_to_cache,
            **_named(identifiers, identifiers["split"]),
            names=BLEND_INDICES,
            facts={},  # weights and size are in the description, and they decide alone
            sources=(),
        )
        quick, full = (lambda arrays: fits(arrays, False)), (lambda arrays: fits(arrays, True))
        arrays = load_or_build(entry, build, quick=quick, full=full)
    else:
        arrays = build()
    return BlendIndex(arrays, len(weights), sequence_length)


def refuse_too_many_samples(
    index: BlendIndex | ApportionedBlend, held: Sequence[int], names: Sequence[str], surplus: float
) -> None:
    """BlendingError for a blend that asks for more samples than a dataset was built with."""
    for number, (asked, has) in enumerate(zip(index.counts(index.end).tolist(), held, strict=True)):
        if asked > has:
            raise BlendingError(
                f"the blend needs {asked} samples of dataset {number} ({names[number]}), which was built with {has}; "
                f"raise mid_level_dataset_surplus, which is {surplus}"
            )


def _named(identifiers: Identifiers, split: str) -> dict[str, str]:
    description = describe(identifiers)
    return {"description": description, "stem": f"{digest(description)}-{identifiers['class']}-{split}"}
