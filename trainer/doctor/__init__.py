"""`hyperdflash doctor`: whether a drafter decodes as it was trained, and if not, what is wrong, in one line each.

`passes.py` watches training's pass and the decoding loop at work (`walks.py`). A fault that both share, such as an
edited config, is out of its sight: for that `files.py` reads what was recorded, and `fits.py` asks the weights.
"""
