"""Where the bytes of weights and gradients lie: flat buffers, their layout, and the units that hold them."""
