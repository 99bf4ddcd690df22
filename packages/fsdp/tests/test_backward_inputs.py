"""What a backward was asked for, seen from inside it: on its own thread, and from a thread that runs nodes for it."""

from __future__ import annotations

import threading

import torch

from sixfold.fsdp.torch_private import backward_inputs


def seen(start, look=backward_inputs):
    """What ``look`` says in a backward that ``start(loss, weights)`` starts; the weights."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    middle = weights[0] * weights[1]
    found = []
    middle.register_hook(lambda gradient: found.append(look()))
    start(middle.sum(), weights)
    return found[0], weights


def from_another_thread():
    """As a CUDA device's thread sees it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(backward_inputs()))
    thread.start()
    thread.join()
    return found[0]


def beside_another_backward():
    """Two threads are in a backward: a third cannot tell which one it works for."""
    inside, leave = threading.Event(), threading.Event()

    def hold(gradient):
        inside.set()
        leave.wait(10)

    def other():
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(hold)
        y.sum().backward(inputs=[x])

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    try:
        return from_another_thread()
    finally:
        leave.set()
        thread.join()


def test_inputs_are_seen_on_the_thread_of_the_backward_and_from_a_devices_thread():
    for look in (backward_inputs, from_another_thread):
        assert seen(lambda loss, weights: loss.backward(), look)[0] is None
        found, weights = seen(lambda loss, weights: loss.backward(inputs=weights[:1]), look)
        assert found == {id(weights[0])}
        found, weights = seen(lambda loss, weights: torch.autograd.backward([loss], inputs=weights), look)
        assert found == {id(one) for one in weights}


def test_nothing_is_guessed_beside_another_backward_and_outside():
    found, _ = seen(lambda loss, weights: loss.backward(inputs=weights[:1]), beside_another_backward)
    assert found is None
    assert backward_inputs() is None
