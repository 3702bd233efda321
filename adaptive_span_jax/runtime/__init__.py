"""The machine a program runs on: devices, hosts, storage, signals, the terminal.

In: what a user asked for (flags, environment). Out: meshes and shardings, places to write, messages on the terminal.
Nothing here knows what a model is. Start with `sharding.py`: how a batch is split over devices. Then `hosts.py`
(several processes as one), `storage.py` (folders and buckets), `terminal.py` (what users see).
`capacity.py` checks memory before it is allocated, `chips.py` has peak FLOP/s, `cpu.py` sets up devices of a CPU.
"""
