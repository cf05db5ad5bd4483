"""
What scale-out/move, shards and verify are made of, from the lowest layer on:

  servers.py      connections and transactions
  places.py       a slot or a scope: its gates, its hint in the map, its rows
  copying.py      its rows, from one shard to another, while calls are refused
  replication.py  the same by logical replication, while it is in use
  steps.py        the protocol of a move, whose model is test/models/gates.pml
  census.py       where all places are, and what each has to do
  plan.py         which places go where
  fleet.py        many moves
  membership.py   shards that come and go
  maps.py         a router's map, made from the gates
"""
