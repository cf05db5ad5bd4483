"""
What scale-out/move is made of, from the lowest layer on:

  servers.py   connections and transactions
  places.py    a slot or a scope: its gates, its hint in the map, its rows
  copying.py   its rows, from one shard to another, while calls are refused
  replication.py   the same by logical replication, while it is in use
  steps.py     the protocol, whose model is test/models/gates.pml
"""
