/*
 * gates.pml
 *		The gates of one place, a slot or a scope, on SHARDS shards: at most one
 *		is open, behind it lie the newest rows, and these are always somewhere.
 *
 * Each gate has a state, an epoch, the last epoch at which it was open, and the
 * shard to which the place leaves.  Each atomic step is one transaction on one
 * shard: it compares the state and the epoch, and sets them.  The epoch of a gate
 * never falls.  A writer writes where a gate is open.  "version" numbers the rows
 * that a shard has, 0 for none, and "newest" those that were acknowledged.
 *
 * Movers and Backs die between any two steps: then they take no further step, which
 * each search includes.  No step believes a map: a mover
 * takes any two shards, as with the map of another router, an old or a restored
 * one.  So the map is only an epoch here, which must not be above that of all gates:
 * a router accepts no lower one.
 *
 * A mover copies while the gate is closed, or with a replication slot.  A slot has a
 * name and begins with the rows of one moment.  Its subscription knows the name only:
 * if a slot of that name begins later, it lacks the rows between.
 *
 * Which function is which step:
 *
 *	Mover			scale-out/move; its steps are idem_guard.reserve(), sweep(),
 *					Replica.start(), check_slot(), idem_guard.close(), set_hint(),
 *					wait_for_the_rest() or copy(), open_here() and clear()
 *	Back			scale-out/move --back: idem_guard.refuse() and reopen(), and
 *					put_right()
 *	Writer			a transaction with idem_pin_scope()
 *	Crash			a shard's crash
 *
 * Left out: a scope whose slot moves at the same time, which scopes.pml has, and
 * shards that are restored from a backup.
 *
 * BOOLEAN is the protocol before epochs: a gate is open or closed, and a mover
 * believes its router's map, of which there are two.  RESTORED is that protocol
 * with one router, and a map that was dumped during a move.  ASYNCHRONOUS is a
 * mover whose commits a crash of the shard can undo.  In CLOSED_COPY, no mover
 * replicates.
 *
 * variant correct               -DSHARDS=2 -DMOVERS=2 -DBACKS=1 passes
 * variant correct-3-shards      -DSHARDS=3 -DMOVERS=2 -DBACKS=1 passes
 * variant correct-2-backs       -DSHARDS=2 -DMOVERS=2 -DBACKS=2 passes
 * variant correct-3-movers      -DSHARDS=3 -DMOVERS=3 -DBACKS=0 -DCLOSED_COPY passes large
 * variant two-routers           -DSHARDS=2 -DMOVERS=2 -DBACKS=1 -DBOOLEAN fails two_are_open
 * variant two-routers-3-shards  -DSHARDS=3 -DMOVERS=2 -DBACKS=1 -DBOOLEAN fails two_are_open|rows_are_old
 * variant restored-map          -DSHARDS=2 -DMOVERS=2 -DBACKS=1 -DRESTORED fails two_are_open|rows_are_old
 * variant asynchronous          -DSHARDS=2 -DMOVERS=2 -DBACKS=1 -DASYNCHRONOUS fails rows_are_lost
 * variant any-epoch-opens       -DSHARDS=3 -DMOVERS=2 -DBACKS=1 -DANY_EPOCH fails two_are_open|rows_are_old
 * variant opened-is-not-asked   -DSHARDS=3 -DMOVERS=3 -DBACKS=0 -DCLOSED_COPY -DNOT_ASKED fails two_are_open|rows_are_old|rows_are_lost
 * variant back-does-not-refuse  -DSHARDS=2 -DMOVERS=2 -DBACKS=1 -DNO_REFUSAL fails two_are_open
 * variant slot-without-target   -DSHARDS=3 -DMOVERS=2 -DBACKS=1 -DSHARED_NAME fails rows_are_old
 * variant map-before-the-gate   -DSHARDS=2 -DMOVERS=2 -DBACKS=1 -DMAP_FIRST fails map_is_ahead
 */
#ifndef SHARDS
#define SHARDS		2
#endif
#ifndef MOVERS
#define MOVERS		2
#endif
#ifndef BACKS
#define BACKS		1
#endif
#define MAX_EPOCH	5
#define MAX_WRITES	2
#define NOTHING		99
#if defined(BOOLEAN) || defined(RESTORED)
#define OLD
#endif

#ifdef NOT_ASKED
#define HAS_NOT_OPENED	true
#else
#define HAS_NOT_OPENED	(before < epoch[from])
#endif
#ifdef ANY_EPOCH
#define IS_OURS		true
#else
#define IS_OURS		(epoch[to] == mine)
#endif

#ifdef SHARED_NAME
#define LEADS_TO(n)	true
#else
#define LEADS_TO(n)	(leads_to[n] == to)
#endif

/* states of a gate; the old ones are AWAY and OPEN */
#define AWAY		0
#define ARRIVING	1
#define OPEN		2
#define LEAVING		3

byte	state[SHARDS];
byte	epoch[SHARDS];
byte	opened[SHARDS];
byte	peer[SHARDS];
byte	version[SHARDS];
byte	newest = 1;

/* the epoch of the map */
byte	map = 1;

/* of each mover, its replication slot: the rows with which it begins, 0 for none,
 * and its name, which is one on each shard */
byte	begins[MOVERS];
byte	slot_of[MOVERS];
byte	slot_epoch[MOVERS];
byte	leads_to[MOVERS];

bool	two_are_open = false;
bool	rows_are_old = false;
bool	rows_are_lost = false;
bool	map_is_ahead = false;

hidden byte s;
hidden byte nopen;
hidden byte found;
hidden byte last;

inline check()
{
	d_step {
		nopen = 0;
		found = 0;
		last = 0;
		s = 0;
		do
		:: s < SHARDS ->
			if
			:: state[s] == OPEN ->
				nopen++;
				if
				:: version[s] != newest -> rows_are_old = true
				:: else
				fi
			:: else
			fi;
			if
			:: version[s] == newest -> found = 1
			:: else
			fi;
			if
			:: state[s] != ARRIVING && epoch[s] > last -> last = epoch[s]
			:: else
			fi;
			s++
		:: else -> break
		od;
		s = 0;
#ifndef OLD
		if
		:: map > last -> map_is_ahead = true
		:: else
		fi;
#endif
		last = 0;
		if
		:: nopen > 1 -> two_are_open = true
		:: else
		fi;
		nopen = 0;
		if
		:: found == 0 -> rows_are_lost = true
		:: else
		fi;
		found = 0
	}
	assert(!two_are_open);
	assert(!rows_are_old);
	assert(!rows_are_lost);
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

#ifdef ASYNCHRONOUS
/* the shard, from 1 on, whose last commit is not on disk */
byte	unflushed = 0;

active proctype Crash()
{
end_crash:
	atomic {
		unflushed > 0 ->
		state[unflushed - 1] = ARRIVING;
		opened[unflushed - 1] = 0;
		version[unflushed - 1] = 0;
		unflushed = 0;
		check()
	}
}

active proctype Walwriter()
{
end_flush:
	do
	:: atomic { unflushed > 0 -> unflushed = 0 }
	od
}
#endif

#ifndef OLD

/* Write into the map, which accepts no lower epoch. */
inline set_hint(e)
{
	atomic {
		if
		:: e > map -> map = e; check()
		:: else
		fi
	}
}

/* Drop the replication slots of this place on the shard, up to the mover's epoch. */
inline sweep()
{
	d_step {
		s = 0;
		do
		:: s < MOVERS ->
			if
			:: begins[s] && slot_of[s] == from && slot_epoch[s] <= mine ->
				begins[s] = 0;
				slot_of[s] = 0;
				slot_epoch[s] = 0;
				leads_to[s] = 0
			:: else
			fi;
			s++
		:: else -> break
		od;
		s = 0
	}
}

/* Before that, refuse the gate of another shard: idem_guard.refuse(). */
inline refuse_third()
{
#if SHARDS > 2
	atomic {
		if
		:: state[3 - from - to] == ARRIVING && epoch[3 - from - to] <= mine ->
			state[3 - from - to] = AWAY;
			epoch[3 - from - to] = mine;
			version[3 - from - to] = 0;
			check()
		:: else
		fi
	}
#else
	skip
#endif
}

/* found: the rows with which the slot of the mover's name begins, or 0 */
inline find_slot()
{
	found = 0;
	s = 0;
	do
	:: s < MOVERS ->
		if
		:: begins[s] && slot_of[s] == from && slot_epoch[s] == mine && LEADS_TO(s) ->
			found = begins[s]
		:: else
		fi;
		s++
	:: else -> break
	od;
	s = 0
}

proctype Mover(byte me)
{
	/* copied: the rows of the first copy, 0 if the gate is closed before the copy */
	byte from, to, mine, before, rows, copied = 0;

	any_shard(from);
	any_shard(to);
	if
	:: from == to -> goto gone
	:: else
	fi;
	/* Two queries, on two shards: another mover may take the same epoch. */
	mine = epoch[from];
	if
	:: epoch[to] > mine -> mine = epoch[to]
	:: else
	fi;
	mine++;
	if
	:: mine > MAX_EPOCH -> goto gone
	:: else
	fi;

	/* reserve(), which deletes what an earlier move has left */
	atomic {
		if
		:: (state[to] == AWAY || state[to] == ARRIVING) && epoch[to] < mine ->
			state[to] = ARRIVING;
			epoch[to] = mine;
			version[to] = 0;
			before = opened[to];
			check()
		:: else -> goto gone
		fi
	}
	refuse_third();

	if
	:: skip						/* It copies while calls are refused. */
#ifndef CLOSED_COPY
	:: state[from] == OPEN ->
		sweep();

		/* Replica.start(): a name can exist once. */
		d_step {
			find_slot();
			if
			:: found == 0 ->
				begins[me] = version[from];
				slot_of[me] = from;
				slot_epoch[me] = mine;
				leads_to[me] = to;
				copied = version[from]
			:: else
			fi;
			found = 0
		}
		if
		:: copied == 0 -> goto gone
		:: else
		fi;

		/* check_slot() */
		d_step {
			find_slot();
			before = (found -> before : NOTHING);
			found = 0
		}
		if
		:: before == NOTHING -> goto gone
		:: else
		fi
#endif
	fi;

#ifdef MAP_FIRST
	set_hint(mine);
#endif
	/* close(), also for a mover that takes over an interrupted move */
	atomic {
		if
		:: state[from] == OPEN && epoch[from] < mine ->
			state[from] = LEAVING;
			epoch[from] = mine;
			peer[from] = to;
			rows = version[from]
		:: state[from] == LEAVING && peer[from] == to && epoch[from] < mine && HAS_NOT_OPENED && !copied ->
			epoch[from] = mine
		:: else -> goto gone
		fi
	}
	set_hint(mine);

	if
	:: copied ->
		/* wait_for_the_rest(): it arrives only if the slot is there. */
		d_step {
			find_slot();
			if
			:: found == 0 -> before = NOTHING
			:: found > copied -> rows = 0		/* some are missing */
			:: else
			fi;
			found = 0
		}
		if
		:: before == NOTHING -> goto gone
		:: else
		fi
	:: else ->
		/* the copy */
		atomic {
			if
			:: state[from] == LEAVING && epoch[from] == mine -> rows = version[from]
			:: else -> goto gone
			fi
		}
	fi;

	/* open_here(), in the transaction that has the rows */
	atomic {
		if
		:: state[to] == ARRIVING && IS_OURS ->
			state[to] = OPEN;
			opened[to] = mine;
			version[to] = rows;
#ifdef ASYNCHRONOUS
			unflushed = to + 1;
#endif
			check()
		:: else -> goto gone
		fi
	}
	set_hint(mine);
	refuse_third();
	sweep();

	/* clear() */
	atomic {
		if
		:: state[from] == LEAVING && epoch[from] == mine ->
			state[from] = AWAY;
			version[from] = 0;
			check()
		:: else
		fi
	}
gone:
	from = 0; to = 0; mine = 0; before = 0; rows = 0; copied = 0; me = 0
}

proctype Back()
{
	byte from, to, mine;

	any_shard(from);
	atomic {
		if
		:: state[from] == LEAVING -> to = peer[from]; mine = epoch[from]
		:: else -> goto gone
		fi
	}

#ifndef NO_REFUSAL
	/* refuse() */
	atomic {
		if
		:: (state[to] == AWAY || state[to] == ARRIVING && epoch[to] <= mine) && opened[to] < mine ->
			state[to] = AWAY;
			version[to] = 0;
			if
			:: epoch[to] < mine -> epoch[to] = mine
			:: else
			fi;
			check()
		/* It is reserved for a later epoch, so nobody opens it at this one. */
		:: state[to] == ARRIVING && epoch[to] > mine && opened[to] < mine
		:: else -> goto gone
		fi
	}
#endif

	/* reopen() */
	atomic {
		if
		:: state[from] == LEAVING && epoch[from] == mine ->
			state[from] = OPEN;
			epoch[from] = mine + 1;
			opened[from] = mine + 1;
			check()
		:: else -> goto gone
		fi
	}
	mine++;
	set_hint(mine);
	refuse_third();
	sweep();
gone:
	from = 0; to = 0; mine = 0
}

#else							/* OLD */

#ifdef RESTORED
#define ROUTERS		1
#else
#define ROUTERS		2
#endif

/* A router's map.  NOWHERE: it is not being moved. */
#define NOWHERE		9
byte	home[ROUTERS];
byte	moving_to[ROUTERS];
bool	locked[ROUTERS];

proctype Mover(byte me)
{
	byte r, from, to, rows;

#if ROUTERS > 1
	if
	:: r = 0
	:: r = 1
	fi;
#endif
	/* One mover at a time for each router */
	atomic {
		if
		:: !locked[r] -> locked[r] = true
		:: else -> goto gone
		fi
	}
	any_shard(to);
	from = home[r];
	if
	:: from == to || (moving_to[r] != NOWHERE && moving_to[r] != to) -> goto over
	:: moving_to[r] == NOWHERE && (state[from] != OPEN || state[to] == OPEN) -> goto over
	:: else
	fi;
	moving_to[r] = to;
	state[from] = AWAY;
	if
	:: goto over				/* it dies */
	:: skip
	fi;
	rows = version[from];
	atomic {
		if
		:: state[to] != OPEN ->
			state[to] = OPEN;
			version[to] = rows;
			check()
		:: else
		fi
	}
	if
	:: goto over
	:: skip
	fi;
	home[r] = to;
	moving_to[r] = NOWHERE;
	atomic {
		if
		:: state[from] == OPEN -> state[from] = AWAY
		:: else -> version[from] = 0
		fi;
		check()
	}
over:
	locked[r] = false;
gone:
	r = 0; from = 0; to = 0; rows = 0
}

proctype Back()
{
	byte r, from, to;

#if ROUTERS > 1
	if
	:: r = 0
	:: r = 1
	fi;
#endif
	atomic {
		if
		:: !locked[r] && moving_to[r] != NOWHERE -> locked[r] = true
		:: else -> goto gone
		fi
	}
	from = home[r];
	to = moving_to[r];
	atomic {
		if
		:: state[to] == OPEN -> home[r] = to; moving_to[r] = NOWHERE
		:: else ->
			state[from] = OPEN;
			moving_to[r] = NOWHERE;
			check()
		fi
	}
	locked[r] = false;
gone:
	r = 0; from = 0; to = 0
}

#ifdef RESTORED
/* The map is dumped at any time, and restored later. */
active proctype Restore()
{
	byte was, was_moving_to;

	atomic { was = home[0]; was_moving_to = moving_to[0] }
end_restore:
	atomic { !locked[0] -> home[0] = was; moving_to[0] = was_moving_to }
}
#endif
#endif							/* OLD */

proctype Writer()
{
	byte writes = 0, where;

	do
	:: writes < MAX_WRITES ->
		any_shard(where);
		atomic {
			writes++;
			if
			:: state[where] == OPEN ->
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
		state[0] = OPEN;
		epoch[0] = 1;
		opened[0] = 1;
		version[0] = newest;
#ifdef OLD
		moving_to[0] = NOWHERE;
#if ROUTERS > 1
		moving_to[1] = NOWHERE;
#endif
#endif
		do
		:: n < MOVERS -> run Mover(n); n++
		:: else -> break
		od;
		n = 0;
		do
		:: n < BACKS -> run Back(); n++
		:: else -> break
		od;
		n = 0;
		run Writer()
	}
}
