"""The machine a program runs on: devices, hosts, storage, signals, the terminal.

In: flags and environment. Out: meshes and shardings, files, messages on the terminal. Nothing here depends on the
model. Start with `sharding.py`: how a batch is split over devices. Then `hosts.py` (several processes), `storage.py`
(folders and buckets), `terminal.py` (output). `capacity.py` checks memory before it is allocated, `chips.py` has peak
FLOP/s, `cpu.py` sets up CPU devices.
"""
