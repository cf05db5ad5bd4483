/*
 * scopes.pml
 *		The gates of a scope and of the slot that it is in: a scope has a gate of
 *		its own, or follows its slot.
 *
 * gates.pml has the protocol of one place.  Here two places share shards, and
 * the gate of the scope is the slot's where it has none of its own.  A scope gets
 * one when it moves.  It loses it when its first move is given up, or when its
 * slot arrives where it is.  "version" numbers the rows of the scope that a shard
 * has, 0 for none.
 *
 * Each atomic step is one transaction on one shard, which holds the lock of the
 * slot's movers (idem_guard.lock_gate).  Movers die between any two steps.  They
 * take any two shards: as with several routers, they know nothing of each other.
 *
 * Which function is which step:
 *
 *	ScopeMover		scale-out/move: idem_guard.reserve(), close(), set_hint(), open_here(),
 *					clear()
 *	ScopeBack		scale-out/move --back: refuse() and reopen(), by which the scope
 *					follows its slot again
 *	SlotMover		scale-out/move --slot.  "own" is whether it knows that the
 *					scope has a gate of its own on the slot's old shard
 *
 * At an open gate, its epoch is at least that of each map, which would not take the
 * gate's shard otherwise.
 *
 * Left out: a slot's way back, and all that gates.pml has.
 *
 * variant correct               -DSHARDS=2 -DSCOPES=2 -DSLOTS=1 -DBACKS=1 passes
 * variant correct-3-shards      -DSHARDS=3 -DSCOPES=1 -DSLOTS=1 -DBACKS=1 passes
 * variant correct-2-slots       -DSHARDS=2 -DSCOPES=1 -DSLOTS=2 -DBACKS=1 passes
 * variant deletes-what-is-open  -DSHARDS=2 -DSCOPES=2 -DSLOTS=1 -DBACKS=1 -DDELETES_OPEN fails rows_are_old|rows_are_lost
 * variant own-is-not-compared   -DSHARDS=3 -DSCOPES=1 -DSLOTS=1 -DBACKS=1 -DNOT_COMPARED fails two_are_open|map_is_ahead
 * variant epoch-is-not-raised   -DSHARDS=2 -DSCOPES=2 -DSLOTS=1 -DBACKS=1 -DNOT_RAISED fails map_is_ahead
 */
#ifndef SHARDS
#define SHARDS		2
#endif
#ifndef SCOPES
#define SCOPES		2
#endif
#ifndef SLOTS
#define SLOTS		1
#endif
#ifndef BACKS
#define BACKS		1
#endif
#define IS_TAKEN_OVER	(own[from] == LEAVING && peer[from] == to && before < own_epoch[from])
#ifdef DELETES_OPEN
#define IS_LEFT(n)	true
#else
#define IS_LEFT(n)	(own[n] == NONE || own[n] == AWAY)
#endif
#ifdef NOT_COMPARED
#define IS_AS_KNOWN	true
#else
#define IS_AS_KNOWN	(knows == (own[from] != NONE))
#endif
#define MAX_EPOCH	6
#define MAX_WRITES	1

/* states of a gate; NONE: the scope follows its slot */
#define AWAY		0
#define ARRIVING	1
#define OPEN		2
#define LEAVING		3
#define NONE		4

/* of the slot, and of the scope, on each shard */
byte	slot[SHARDS];
byte	slot_epoch[SHARDS];
byte	slot_opened[SHARDS];
byte	own[SHARDS];
byte	own_epoch[SHARDS];
byte	own_opened[SHARDS];
byte	peer[SHARDS];
bool	follows[SHARDS];
byte	version[SHARDS];
byte	newest = 1;

/* the epoch that the map of a router has for the scope: it takes no lower one */
byte	hint = 0;

bool	two_are_open = false;
bool	rows_are_old = false;
bool	rows_are_lost = false;
bool	it_is_nowhere = false;
bool	map_is_ahead = false;

hidden byte s;
hidden byte nopen;
hidden byte nhere;
hidden byte found;

/* the scope's gate: its own, or that of its slot */
#define STATE(n)	(own[n] == NONE -> slot[n] : own[n])
#define EPOCH(n)	(own[n] == NONE -> slot_epoch[n] : own_epoch[n])
#define OPENED(n)	(own[n] == NONE -> slot_opened[n] : own_opened[n])

inline check()
{
	d_step {
		nopen = 0;
		nhere = 0;
		found = 0;
		s = 0;
		do
		:: s < SHARDS ->
			if
			:: STATE(s) == OPEN || STATE(s) == LEAVING -> nhere++
			:: else
			fi;
			if
			:: STATE(s) == OPEN ->
				nopen++;
				if
				:: version[s] != newest -> rows_are_old = true
				:: else
				fi;
				if
				:: hint > EPOCH(s) -> map_is_ahead = true
				:: else
				fi
			:: else
			fi;
			if
			:: version[s] == newest -> found = 1
			:: else
			fi;
			s++
		:: else -> break
		od;
		s = 0;
		if
		:: nopen > 1 -> two_are_open = true
		:: else
		fi;
		nopen = 0;
		if
		:: nhere == 0 -> it_is_nowhere = true
		:: else
		fi;
		nhere = 0;
		if
		:: found == 0 -> rows_are_lost = true
		:: else
		fi;
		found = 0
	}
	assert(!two_are_open);
	assert(!rows_are_old);
	assert(!rows_are_lost);
	assert(!it_is_nowhere);
	assert(!map_is_ahead)
}

inline any_shard(n)
{
	if
	:: n = 0
	:: n = 1
#if SHARDS > 2
	:: n = 2
#endif
	fi
}

/* It goes on, or never does. */
inline may_die()
{
	if
	:: goto gone
	:: skip
	fi
}

/* highest_epoch() of all shards, and one more */
inline next_epoch(mine)
{
	d_step {
		mine = 0;
		s = 0;
		do
		:: s < SHARDS ->
			if
			:: slot_epoch[s] > mine -> mine = slot_epoch[s]
			:: else
			fi;
			if
			:: own[s] != NONE && own_epoch[s] > mine -> mine = own_epoch[s]
			:: else
			fi;
			s++
		:: else -> break
		od;
		s = 0;
		mine++
	}
}

/* "state" comes last: the others can depend on it. */
#define set_own(n, new_state, new_epoch, new_opened) \
	own_opened[n] = new_opened; own_epoch[n] = new_epoch; own[n] = new_state
#define HIGHER(a, b)	(a > b -> a : b)

/* no gate of its own: what it had does not matter */
inline drop_own(n)
{
	own[n] = NONE;
	own_epoch[n] = 0;
	own_opened[n] = 0;
	peer[n] = 0;
	follows[n] = false
}

proctype ScopeMover()
{
	byte from, to, mine, before, rows;

	any_shard(from);
	any_shard(to);
	if
	:: from == to -> goto gone
	:: else
	fi;
	next_epoch(mine);
	if
	:: mine > MAX_EPOCH -> goto gone
	:: else
	fi;

	/* reserve() */
	atomic {
		if
		:: (STATE(to) == AWAY || STATE(to) == ARRIVING) && EPOCH(to) < mine ->
			before = OPENED(to);
			set_own(to, ARRIVING, mine, before);
			follows[to] = false;
			version[to] = 0;
			check()
		:: else -> goto gone
		fi
	}
	may_die();

	/* close() */
	atomic {
		if
		:: EPOCH(from) < mine && (STATE(from) == OPEN || IS_TAKEN_OVER) ->
			if
			:: own[from] == NONE -> follows[from] = true
			:: else
			fi;
			set_own(from, LEAVING, mine, OPENED(from));
			peer[from] = to
		:: else -> goto gone
		fi
	}
	may_die();

	/* set_hint() */
	atomic {
		if
		:: hint < mine -> hint = mine; check()
		:: else
		fi
	}
	may_die();

	/* the copy */
	atomic {
		if
		:: own[from] == LEAVING && own_epoch[from] == mine -> rows = version[from]
		:: else -> goto gone
		fi
	}
	may_die();

	/* open_here() */
	atomic {
		if
		:: own[to] == ARRIVING && own_epoch[to] == mine ->
			set_own(to, OPEN, mine, mine);
			version[to] = rows;
			check()
		:: else -> goto gone
		fi
	}
	may_die();

	/* clear() */
	atomic {
		if
		:: STATE(from) != OPEN && (STATE(from) == AWAY || EPOCH(from) <= mine) ->
			set_own(from, AWAY, HIGHER(EPOCH(from), mine), OPENED(from));
			peer[from] = 0;
			follows[from] = false;
			version[from] = 0;
			check()
		:: else
		fi
	}
gone:
	from = 0; to = 0; mine = 0; before = 0; rows = 0
}

proctype ScopeBack()
{
	byte from, to, mine;

	any_shard(from);
	atomic {
		if
		:: own[from] == LEAVING -> to = peer[from]; mine = own_epoch[from]
		:: else -> goto gone
		fi
	}
	may_die();

	/* refuse() */
	atomic {
		if
		:: (STATE(to) == AWAY || STATE(to) == ARRIVING && EPOCH(to) <= mine) && OPENED(to) < mine ->
			set_own(to, AWAY, HIGHER(EPOCH(to), mine), OPENED(to));
			follows[to] = false;
			version[to] = 0;
			check()
		:: STATE(to) == ARRIVING && EPOCH(to) > mine && OPENED(to) < mine
		:: else -> goto gone
		fi
	}
	may_die();

	/* reopen() */
	atomic {
		if
		:: own[from] == LEAVING && own_epoch[from] == mine ->
			if
			:: follows[from] && slot[from] == OPEN ->
#ifndef NOT_RAISED
				if
				:: slot_epoch[from] < mine + 1 -> slot_epoch[from] = mine + 1
				:: else
				fi;
				if
				:: slot_opened[from] < mine + 1 -> slot_opened[from] = mine + 1
				:: else
				fi;
#endif
				drop_own(from)
			:: else -> set_own(from, OPEN, mine + 1, mine + 1); follows[from] = false
			fi;
			check()
		:: else
		fi
	}
gone:
	from = 0; to = 0; mine = 0
}

proctype SlotMover()
{
	byte from, to, mine, before, rows;
	bool knows;

	any_shard(from);
	any_shard(to);
	if
	:: from == to -> goto gone
	:: else
	fi;
	/* look_at() and check_scopes() */
	atomic {
		knows = (own[from] != NONE);
		if
		:: own[from] == LEAVING || own[to] == ARRIVING -> goto gone
		:: else
		fi
	}
	next_epoch(mine);
	if
	:: mine > MAX_EPOCH -> goto gone
	:: else
	fi;

	/* reserve() */
	atomic {
		if
		:: (slot[to] == AWAY || slot[to] == ARRIVING) && slot_epoch[to] < mine ->
			slot[to] = ARRIVING;
			slot_epoch[to] = mine;
			before = slot_opened[to];
			if
			:: !knows && IS_LEFT(to) -> version[to] = 0
			:: else
			fi;
			check()
		:: else -> goto gone
		fi
	}
	may_die();

	/* close() */
	atomic {
		if
		:: slot_epoch[from] < mine && slot[from] == OPEN && IS_AS_KNOWN ->
			slot[from] = LEAVING;
			slot_epoch[from] = mine
		:: else -> goto gone
		fi
	}
	may_die();

	/* the copy, of a scope that goes with it */
	atomic {
		if
		:: slot[from] == LEAVING && slot_epoch[from] == mine -> rows = version[from]
		:: else -> goto gone
		fi
	}
	may_die();

	/* open_here() */
	atomic {
		if
		:: slot[to] == ARRIVING && slot_epoch[to] == mine && (knows || IS_LEFT(to)) ->
			slot[to] = OPEN;
			slot_opened[to] = mine;
			if
			:: knows ->
				if
				:: own[to] == NONE -> own[to] = AWAY
				:: else
				fi
			:: else ->
				drop_own(to);
				version[to] = rows
			fi;
			check()
		:: else -> goto gone
		fi
	}
	may_die();

	/* clear() */
	atomic {
		if
		:: slot[from] != OPEN && (slot[from] == AWAY || slot_epoch[from] <= mine) ->
			slot[from] = AWAY;
			if
			:: slot_epoch[from] < mine -> slot_epoch[from] = mine
			:: else
			fi;
			if
			:: !knows && IS_LEFT(from) -> version[from] = 0
			:: else
			fi;
			check()
		:: else
		fi
	}
gone:
	from = 0; to = 0; mine = 0; before = 0; rows = 0; knows = false
}

proctype Writer()
{
	byte writes = 0, where;

	do
	:: writes < MAX_WRITES ->
		any_shard(where);
		atomic {
			writes++;
			if
			:: STATE(where) == OPEN ->
				newest++;
				version[where] = newest;
				check()
			:: else
			fi
		}
	:: else -> break
	od;
	where = 0
}

init
{
	byte n = 0;

	atomic {
		do
		:: n < SHARDS -> own[n] = NONE; n++
		:: else -> break
		od;
		slot[0] = OPEN;
		slot_epoch[0] = 1;
		slot_opened[0] = 1;
		version[0] = newest;
		n = 0;
		do
		:: n < SCOPES -> run ScopeMover(); n++
		:: else -> break
		od;
		n = 0;
		do
		:: n < SLOTS -> run SlotMover(); n++
		:: else -> break
		od;
		n = 0;
		do
		:: n < BACKS -> run ScopeBack(); n++
		:: else -> break
		od;
		n = 0;
		run Writer()
	}
}
