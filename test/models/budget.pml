/*
 * budget.pml
 *		The limits of a take, across lanes: a due message of a lane that is not
 *		held is taken in the end, whatever the other lanes do.
 *
 * A take goes through the due entries of the index in the order of their times.
 * An adversary has LANES lanes with one entry each, in every state in which
 * idem_lane_move_signpost() can find a lane.  It changes them at any time and
 * never stops.  "z" is the entry of another lane, which nobody else touches.  It
 * becomes due at any time: behind the others, or before them if its publisher
 * commits late.
 *
 * Limits: a take ends when it has examined EXAMINED entries, has written WRITTEN
 * rows, or has the message that it wanted.  The relay's next take goes on behind
 * the last entry that this one examined.  A pass, one or more takes, goes as far
 * as the entries that were due when it began, and the next pass begins with the
 * first entry again.
 *
 * Which function is which step:
 *
 *	Relay			idem_outbox_take(): take() with take_ready() and is_over(); one
 *					call is one step
 *	visit			take_lane() with idem_lane_move_signpost()
 *	Adversary		idem_publish(), the ends of transactions, idem_outbox_ack(),
 *					idem_outbox_extend(), and times that come
 *	Z				a publisher's commit
 *
 * Left out: steps within a take (see lanes.pml), several messages per take, and
 * deaths.  Several entries of one lane are several lanes here.
 *
 * VAIN is the code of issue 27 as it was: 500 visits without result end a take,
 * visits that wrote nothing count, and the next take begins with the first
 * entry.  Restricted to parked and extended messages it is bug A.1, restricted
 * to open transactions it is bug A.2.  KEEPS_MARK is bug A.4: a mark below which
 * a backend never looks again.
 *
 * variant correct               -DLANES=2 -DEXAMINED=1 -DWRITTEN=1 passes
 * variant correct-2-1           -DLANES=2 -DEXAMINED=2 -DWRITTEN=1 passes
 * variant correct-2-2           -DLANES=2 -DEXAMINED=2 -DWRITTEN=2 passes
 * variant correct-parked        -DLANES=2 -DEXAMINED=2 -DNO_OPEN passes
 * variant correct-open          -DLANES=2 -DEXAMINED=2 -DNO_EXTEND passes
 * variant correct-3-2           -DLANES=3 -DEXAMINED=2 -DWRITTEN=2 -DNO_EXTEND passes
 * variant correct-3-1           -DLANES=3 -DEXAMINED=1 -DWRITTEN=1 passes large
 * variant a1-parked-lanes       -DLANES=2 -DEXAMINED=2 -DNO_OPEN -DVAIN fails cycle
 * variant a2-open-publisher     -DLANES=2 -DEXAMINED=2 -DNO_EXTEND -DVAIN fails cycle
 * variant a4-mark-is-kept       -DLANES=2 -DEXAMINED=1 -DWRITTEN=1 -DKEEPS_MARK fails cycle
 * variant not-continued         -DLANES=2 -DEXAMINED=2 -DWRITTEN=2 -DNO_CONTINUE fails cycle
 * variant rollback-forgets      -DLANES=2 -DEXAMINED=2 -DWRITTEN=2 -DFORGETS fails cycle
 * variant pass-without-end      -DLANES=2 -DEXAMINED=1 -DWRITTEN=1 -DNO_PASS_END fails cycle
 */
#ifndef LANES
#define LANES		2
#endif
#ifndef EXAMINED
#define EXAMINED	1
#endif
#ifndef WRITTEN
#define WRITTEN		1
#endif

/* a lane's entry in the index: the first ready row that is not its head */
#define NONE		0
#define ENDED		1				/* due; acknowledged or dead */
#define PENDING		2				/* due; pending */
#define LATER		3				/* due when its head is */

/* its head */
#define NO_HEAD		0
#define PUBLISHED	1				/* by an open transaction */
#define HELD		2				/* being written by an open transaction */
#define LEASED		3				/* ready, and leased */
#define EXTENDED	4				/* parked, and leased */
#define DELAYED		5				/* parked, and not due yet */
#define DUE			6				/* parked, and due */

byte	entry[LANES];
byte	head[LANES];

/* The due entries in the order of their times; LANES stands for z. */
byte	queue[LANES + 1];
byte	length = 0;
byte	position = 0;				/* of the pass */
byte	pass_end = 0;				/* no further than this */
byte	mark = 0;					/* no pass begins before this */
bool	z_taken = false;

ltl taken { <> z_taken }

hidden byte j;

/* An entry becomes due at this place of the queue. */
inline insert(lane, place) {
	j = length;
	do
	:: j > place -> queue[j] = queue[j - 1]; j--
	:: else -> break
	od;
	queue[place] = lane;
	length++;
	if :: place < position -> position++ :: else fi;
	if :: place < pass_end -> pass_end++ :: else fi;
	j = 0
}

inline remove(place) {
	j = place;
	length--;
	do
	:: j < length -> queue[j] = queue[j + 1]; j++
	:: else -> break
	od;
	queue[length] = 0;
	pass_end--;
	j = 0
}

/*
 * The take examines the entry at "position".  What it leaves is behind that.
 */
inline visit(lane) {
	if
	:: lane == LANES ->
		z_taken = true;
		remove(position);
		wanted = 0
	:: lane < LANES && (head[lane] == PUBLISHED || head[lane] == HELD) ->
		position++					/* early return: another transaction has it */
	:: lane < LANES && (head[lane] == NO_HEAD || head[lane] == LEASED) ->
		entry[lane] = NONE;
		remove(position);
		written++
	:: lane < LANES && (head[lane] == EXTENDED || head[lane] == DELAYED) && entry[lane] == ENDED ->
		entry[lane] = LATER;
		remove(position);
		written++
	:: lane < LANES && head[lane] == EXTENDED && entry[lane] == PENDING ->
		position++					/* early return: a relay has the head */
	:: lane < LANES && head[lane] == DELAYED && entry[lane] == PENDING ->
		head[lane] = LEASED;		/* ready, and not due */
		entry[lane] = NONE;
		remove(position);
		written++
	:: lane < LANES && head[lane] == DUE ->
		head[lane] = LEASED;
		written++;
		wanted = 0;
		if
		:: entry[lane] == ENDED -> entry[lane] = NONE; remove(position)
		:: else -> position++
		fi
	fi
}

/* What a limit counts, and where a take begins. */
#ifdef VAIN
#define NO_CONTINUE
#define counts				(head[lane] != DUE)
#define has_written_enough	false
#else
#define counts				true
#define has_written_enough	(written >= WRITTEN)
#endif
#ifdef NO_CONTINUE
#define begins_pass			true
#else
#define begins_pass			(position >= end_of_pass)
#endif
#ifdef NO_PASS_END
#define end_of_pass			length
#else
#define end_of_pass			pass_end
#endif
#ifdef FORGETS
/* It returned nothing, so the subtransaction of the wait is rolled back. */
#define forgets				(wanted > 0 && written == 0)
#else
#define forgets				false
#endif

active proctype Relay() {
	byte lane, examined, written, wanted;

	do
	:: d_step {
		examined = 0;
		written = 0;
		wanted = 1;
		if
		:: begins_pass -> position = mark; pass_end = length
		:: else
		fi;
		do
		:: position < end_of_pass && examined < EXAMINED && !has_written_enough && wanted > 0 ->
			lane = queue[position];
			if
			:: lane < LANES && !counts
			:: else -> examined++
			fi;
			visit(lane)
		:: else -> break
		od;
		/* Between two passes there is only one state. */
		if
		:: position >= end_of_pass || forgets -> position = 0; pass_end = 0
		:: else
		fi;
		lane = 0;
		examined = 0;
		written = 0;
		wanted = 0
	}
	od
}

/*
 * Each step is one of another session, or a time that comes.
 */
active proctype Adversary() {
	byte l;

	do
	:: atomic {
		select(l : 0 .. LANES - 1);
		if
#ifndef NO_OPEN
		:: head[l] == NO_HEAD && entry[l] != PENDING ->
			/* published; the message before it is acknowledged */
			head[l] = PUBLISHED;
			if
			:: entry[l] != ENDED -> entry[l] = ENDED; insert(l, length)
			:: else
			fi
		:: head[l] == PUBLISHED ->
			if
			:: head[l] = NO_HEAD
			:: head[l] = DUE
			:: head[l] = DELAYED
			fi
		:: head[l] == LEASED || head[l] == EXTENDED || head[l] == DUE ->
			head[l] = HELD
		:: head[l] == HELD ->
			if
			:: head[l] = LEASED
			:: head[l] = NO_HEAD;		/* acknowledged, while the next is held */
				if
				:: entry[l] == NONE || entry[l] == LATER ->
					entry[l] = ENDED;
					insert(l, length)
				:: else
				fi
			fi
#endif
#ifndef NO_EXTEND
		:: head[l] == DUE ->
			head[l] = EXTENDED			/* a late holder extends its lease */
		:: head[l] == EXTENDED && entry[l] == LATER ->
			/* its time comes, but the head has been extended once more */
			if
			:: entry[l] = ENDED
			:: entry[l] = PENDING
			fi;
			insert(l, length)
#endif
		:: head[l] == LEASED && entry[l] == NONE ->
			entry[l] = PENDING;			/* the lease of a follower ends */
			insert(l, length)
		:: head[l] == NO_HEAD && entry[l] == NONE ->
			head[l] = DUE;				/* published before, and parked */
			entry[l] = PENDING;
			insert(l, length)
		:: head[l] == DELAYED ->
			head[l] = DUE;
			if
			:: entry[l] == LATER -> entry[l] = ENDED; insert(l, length)
			:: else
			fi
		:: true
		fi;
		l = 0
	}
	od
}

active proctype Z() {
	if
	:: d_step { true -> insert(LANES, length) }
	:: d_step {
			true ->					/* it read the clock long ago */
			if
			:: pass_end > 0 && position == 0 ->
				insert(LANES, 0);	/* what the pass examined is gone */
				position++
			:: else -> insert(LANES, 0)
			fi;
#ifdef KEEPS_MARK
			mark++
#endif
		}
	fi
}
