"""
The parts of scale-out/move, shards and verify, from the lowest layer up:

  servers.py      connections and transactions
  places.py       a slot or a scope: its gates, its hint in the map, its rows
  copying.py      copies its rows to another shard while calls are refused
  replication.py  copies them by logical replication while it is in use
  steps.py        the protocol of a move, modeled in test/models/gates.pml
  census.py       where all places are, and their loads
  plan.py         which places move to which shard
  fleet.py        many moves
  membership.py   shards that are added and removed
  maps.py         a router's map, made from the gates
"""
