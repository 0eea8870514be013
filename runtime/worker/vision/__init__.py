"""Images: fetched, prepared, encoded, and put among the tokens.

Where mlx-vlm is not installed a worker serves text only. Knows no protocol: an image is bytes or
an address, and a place in a text.
"""
