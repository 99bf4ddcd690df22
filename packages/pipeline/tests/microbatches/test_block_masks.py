"""flex_attention's document masks, which torchtitan's models are given: each microbatch gets its own rows."""

import pytest
import torch
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b
from sixfold.pipeline.from_torch import cut

flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs a torch with flex_attention")

LENGTH, WIDTH, BLOCK = 64, 16, 16  # flex_attention has no backward on CPUs


def documents(rows: int) -> Tensor:
    """Of each position the number of its document; other boundaries in each row."""
    starts = torch.zeros(rows, LENGTH, dtype=torch.int64)
    for row in range(rows):
        starts[row, 3 + 8 * row :: 24] = 1
    return starts.cumsum(1)


def mask_of(document: Tensor):
    def same_document(b, h, q, kv):
        return (q >= kv) & (document[b, q] == document[b, kv])

    return flex.create_block_mask(same_document, len(document), None, LENGTH, LENGTH, "cpu", BLOCK)


def dense_of(document: Tensor) -> Tensor:
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask) -> Tensor:
        heads = self.layer(x)[:, None]
        return flex.flex_attention(heads, heads, heads, block_mask=mask)[:, 0]


def plainly(module: nn.Module, x: Tensor, document: Tensor) -> Tensor:
    heads = module.layer(x)[:, None]
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=dense_of(document))[:, 0]


@pytest.mark.parametrize("m", [1, 2])
@torch.no_grad()
@pytest.mark.slow
def test_each_microbatch_sees_the_documents_of_its_own_rows(m):
    torch.manual_seed(0)
    module, document, x = Attends(), documents(4), torch.randn(4, LENGTH, WIDTH)
    parts = cut({"mask": mask_of(document)}, m, "kwargs", equal=True)
    made = torch.cat([module(rows, **kwargs) for rows, kwargs in zip(x.chunk(m), parts, strict=True)])
    torch.testing.assert_close(made, plainly(module, x, document))


def test_masks_have_the_blocks_that_torch_makes_of_those_rows_alone():
    document = documents(4)
    for k, part in enumerate(cut(mask_of(document), 2, "mask", equal=True)):
        alone = mask_of(document[2 * k : 2 * k + 2])
        assert part.shape == alone.shape
        assert torch.equal(part.to_dense(), alone.to_dense())
        for name in ("kv_num_blocks", "q_num_blocks", "full_kv_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(part, name), getattr(alone, name)), name


def test_a_mask_for_all_rows_goes_to_each_microbatch():
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, "cpu", BLOCK)
    assert cut([mask], 3, "args", equal=True) == [[mask]] * 3


def test_a_mask_of_rows_that_microbatches_do_not_divide_is_refused():
    with pytest.raises(ScheduleError, match="mask has 3 rows for 2 microbatches; each counts equally"):
        cut(mask_of(documents(3)), 2, "mask", equal=True)
    parts = cut(mask_of(documents(3)), 2, "mask", equal=False)
    assert [part.shape[0] for part in parts] == [2, 1]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2, 2, 2, 2], r"kwargs\['mask'\] has 4 rows, the batch 8; a dict is cut as the batch is"),
        ([1, 1, 1, 1], None),
        ([2, 1, 0, 1], r"kwargs\['mask'\] has 4 rows to be cut evenly, .* unequal rows; give a list of 4 dicts"),
    ],
)
@torch.no_grad()
def test_a_mask_of_other_rows_than_the_microbatches_is_refused(sizes, words):
    stages = [Stage(Attends(), i) for i in range(2)]
    runner = PipelineRunner(one_f_one_b(2, 4), stages, None)
    x = list(torch.randn(sum(sizes), LENGTH, WIDTH).split(sizes))
    kwargs = {"mask": mask_of(documents(4))}
    if words is None:
        assert len(runner.forward(x, kwargs=kwargs).outputs) == 4
        return
    with pytest.raises(ScheduleError, match=words):
        runner.forward(x, kwargs=kwargs)
