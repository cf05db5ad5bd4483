/*
 * wake.pml
 *		A wait and its wake-up: no waiter sleeps while it could go on.
 *
 * The look that each waiter makes once a second is left out, so that a lost
 * wake-up shows: in the end no message lies there that a sleeping relay could
 * take, and nobody sleeps who waits for a claim that has ended.
 *
 * Messages.  Relays want one message each, wait for it, and go when they have
 * it.  One of them gives up at some time (its deadline, a cancel, an error), and
 * one listens to another topic, whose bit is that of ours.  A message can be
 * parked: a take that finds it writes its row, and returns without a message, so
 * that this is committed.  It can be leased and become available without a
 * commit.  In front of the messages stands an entry of a lane that a prepared
 * transaction holds.  A take with BUDGET examines one entry and ends; the next
 * one goes on behind it.
 *
 * Claims (CLAIMS).  Waiters sleep until the claim of a key has ended.
 *
 * Which function is which step:
 *
 *	enter, leave		enter(), idem_await_no_more()
 *	look				take_or_wait(): try_take(), next_due(); the claim's is
 *						idem_claim_in() with sleep_on_lease()
 *	sleep				idem_await_change(): elect_timekeeper(), ResetLatch(),
 *						is_woken(), WaitLatch()
 *	wake_up				wake(): the marks under the spinlock, then the latches
 *	end_transaction		at_transaction_end(), for what idem_message_changes() has
 *						noted
 *	wake_next			idem_wake_next()
 *	Ender				idem_complete() and the like: change_claim(), then
 *						idem_claim_ends(), then at_transaction_end()
 *
 * Bug A.3 is NO_NOTE: idem_outbox_set_ready() notes no topic, so a take that
 * only writes a parked message's row wakes nobody when it ends.
 *
 * variant correct               -DRELAYS=2 -DMESSAGES=2 passes
 * variant correct-one           -DRELAYS=2 -DMESSAGES=1 passes
 * variant correct-no-lease      -DRELAYS=2 -DMESSAGES=2 -DLEASES=0 passes
 * variant correct-budget        -DRELAYS=2 -DMESSAGES=1 -DBUDGET passes
 * variant correct-alone         -DRELAYS=1 -DMESSAGES=1 -DSTAYS -DBUDGET passes
 * variant correct-leased        -DRELAYS=2 -DMESSAGES=1 -DLEASED_FIRST passes
 * variant correct-other-topic   -DRELAYS=2 -DMESSAGES=1 -DOTHER_TOPIC passes
 * variant correct-claims        -DCLAIMS -DRELAYS=3 passes
 * variant correct-three         -DRELAYS=3 -DMESSAGES=1 passes large
 * variant a3-parks-silently     -DRELAYS=2 -DMESSAGES=1 -DNO_NOTE fails wake_up_was_lost
 * variant a3-abort-is-silent    -DRELAYS=2 -DMESSAGES=1 -DNOT_THERE fails wake_up_was_lost
 * variant budget-wakes-none     -DRELAYS=2 -DMESSAGES=1 -DBUDGET -DNO_NEXT_AT_BUDGET fails wake_up_was_lost
 * variant budget-sleeps         -DRELAYS=1 -DMESSAGES=1 -DSTAYS -DBUDGET -DSLEEPS_EARLY fails wake_up_was_lost
 * variant looks-then-enters     -DRELAYS=2 -DMESSAGES=1 -DNO_SECOND_LOOK fails wake_up_was_lost
 * variant wakes-before-commit   -DRELAYS=2 -DMESSAGES=1 -DWAKE_FIRST fails wake_up_was_lost
 * variant mark-cleared-late     -DRELAYS=2 -DMESSAGES=2 -DCLEAR_LATE fails wake_up_was_lost
 * variant latch-reset-late      -DRELAYS=2 -DMESSAGES=1 -DRESET_LATE fails wake_up_was_lost
 * variant not-handed-on         -DRELAYS=2 -DMESSAGES=1 -DNO_HAND_ON fails wake_up_was_lost
 * variant full-wakes-none       -DRELAYS=2 -DMESSAGES=2 -DLEASES=0 -DNO_NEXT fails wake_up_was_lost
 * variant abort-wakes-none      -DRELAYS=2 -DMESSAGES=1 -DABORT_SILENT fails wake_up_was_lost
 * variant time-not-handed-on    -DRELAYS=2 -DMESSAGES=1 -DLEASED_FIRST -DTIME_ENDS fails wake_up_was_lost
 * variant stops-at-unsure       -DRELAYS=2 -DMESSAGES=1 -DOTHER_TOPIC -DSTOPS_UNSURE fails wake_up_was_lost
 * variant claims-count-first    -DCLAIMS -DRELAYS=3 -DCOUNT_FIRST fails wake_up_was_lost
 * variant claims-wake-one       -DCLAIMS -DRELAYS=3 -DWAKE_ONE fails wake_up_was_lost
 * variant claims-prepared       -DCLAIMS -DRELAYS=3 -DPREPARE_SILENT fails wake_up_was_lost
 */
#ifndef RELAYS
#define RELAYS		2
#endif
#ifndef MESSAGES
#define MESSAGES	2
#endif

bool	entered[RELAYS];			/* in the chain */
bool	woken[RELAYS];				/* the mark in the entry */
bool	latch[RELAYS];
bool	keeps_time[RELAYS];			/* its entry has a timer */
bool	is_time[RELAYS];			/* which has come */
bool	asleep[RELAYS];
byte	waiters = 0;				/* nwaiters */

hidden byte wake_up_was_lost;

/*
 * wake(), in two steps.  The relays with the lowest numbers are the first in the
 * chain; with OTHER_TOPIC the first one listens to something else.  "except" is
 * not woken.
 */
#ifdef OTHER_TOPIC
#define is_sure(w)			(w != 0)
#else
#define is_sure(w)			true
#endif
#ifdef STOPS_UNSURE
#define stops_at(w)			true
#else
#define stops_at(w)			is_sure(w)
#endif
#if defined(CLAIMS) && !defined(WAKE_ONE)
#define wakes_all			true
#else
#define wakes_all			false
#endif

inline wake_up(except) {
	d_step {
		n = 0;
		do
		:: n < RELAYS && entered[n] && n != except ->
			if
			:: !woken[n] -> woken[n] = true; set = set | (1 << n)
			:: else
			fi;
			if
			:: stops_at(n) && !wakes_all -> break
			:: else -> n++
			fi
		:: n < RELAYS && (!entered[n] || n == except) -> n++
		:: n >= RELAYS -> break
		od;
		n = 0
	};
	d_step {
		do
		:: n < RELAYS -> latch[n] = latch[n] || (set & (1 << n)); n++
		:: else -> break
		od;
		n = 0;
		set = 0
	}
}

inline enter(w) {
	d_step { entered[w] = true; woken[w] = false };
	waiters++
}

/* idem_await_change(): its loop.  "leave" is where a waiter goes that gives up. */
#ifdef RESET_LATE
#define is_to_go_on(w)		(woken[w] || is_time[w])
#define is_to_sleep			true
#else
#define is_to_go_on(w)		false
#define is_to_sleep			(!woken[w] && !is_time[w])
#endif
#ifdef STAYS
#define gives_up(w)			false
#else
#define gives_up(w)			(w == 0)
#endif

inline sleep_on_latch(w) {
	do
	:: is_to_go_on(w) -> break
	:: else ->
		latch[w] = false;
		if
		:: is_to_sleep ->
			asleep[w] = true;
end_asleep:
			if
			:: atomic { latch[w] || is_time[w] -> asleep[w] = false }
			:: atomic { gives_up(w) -> asleep[w] = false; goto leave }
			fi
		:: else -> break
		fi
	od
}

inline wake_from_sleep(w) {
	atomic { woken[w] = false; keeps_time[w] = false; is_time[w] = false }
}

#ifndef CLAIMS

#define ABSENT		0
#define READY		1
#define PARKED		2				/* a take has to write its row first */
#define LEASED		3				/* available when the lease ends */
#define GONE		4
#define WRITTEN		5				/* by an open transaction, of a relay */

byte	message[MESSAGES];
#define some_message_is(state)	(message[0] == state || message[MESSAGES - 1] == state)
#ifndef LEASES
#define LEASES		1
#endif
byte	leases = LEASES;			/* that still end without an answer */

#ifdef NO_NOTE
#define notes_parked	false
#else
#define notes_parked	true
#endif
#if defined(NO_NOTE) || defined(NOT_THERE)
#define was_there		false
#else
#define was_there		true
#endif
#ifdef ABORT_SILENT
#define abort_wakes		false
#else
#define abort_wakes		true
#endif

/* What has become of a look. */
#define NOTHING			0
#define GOT				1			/* a message */
#define WROTE			2			/* a parked message's row */
#define EXAMINED		3			/* as many entries as it may, and there are more */

inline look() {
	d_step {
		m = 0;
		found = NOTHING;
		sees_lease = false;
		if
#ifdef BUDGET
		:: !passed -> passed = true; found = EXAMINED
#endif
		:: else ->
			passed = false;
			do
			:: m < MESSAGES && message[m] == READY && is_sure(w) ->
				message[m] = WRITTEN;
				found = GOT;
				break
			:: m < MESSAGES && message[m] == PARKED && is_sure(w) ->
				message[m] = WRITTEN;
				found = WROTE;
				break
			:: m < MESSAGES && message[m] == LEASED && is_sure(w) ->
				sees_lease = true;
				m++
			:: m < MESSAGES && (!is_sure(w) || message[m] == ABSENT || message[m] == GONE ||
					message[m] == WRITTEN) -> m++
			:: m >= MESSAGES -> m = 0; break
			od
		fi
	}
}

/* The transaction of a relay that has written message m, ends. */
inline end_transaction() {
	if
	:: found == GOT ->
		if
		:: message[m] = GONE;			/* taken, and acknowledged in time */
			notes = false
		:: atomic { leases > 0 -> leases--; message[m] = LEASED };
			notes = true				/* it will be due within a second */
		:: message[m] = READY;			/* rolled back */
			notes = abort_wakes
		fi
	:: found == WROTE ->
		if
		:: message[m] = READY; notes = notes_parked
		:: message[m] = PARKED; notes = was_there
		fi
	fi;
	if
	:: notes && waiters > 0 -> wake_up(RELAYS)
	:: else
	fi
}

proctype Relay(byte w) {
	byte m, n, found, set;
	bool passed, sees_lease, notes, was_woken, kept_time;

#ifdef NO_SECOND_LOOK
	look();
	if :: found != NOTHING -> goto leave :: else fi;
	enter(w);
	goto falls_asleep;
#endif
	do
	:: look();
		if
		:: found == GOT || found == WROTE -> break
#ifndef SLEEPS_EARLY
		:: found == EXAMINED ->
			if
			:: gives_up(w) -> break		/* its deadline has come */
			:: true -> goto next
			fi
#endif
		:: else
		fi;
		if
		:: !entered[w] -> enter(w); goto next
		:: else
		fi;
falls_asleep:
		/* idem_await_change() */
		atomic {
			n = 0;
			do
			:: n < RELAYS && !(keeps_time[n] && is_sure(n)) -> n++
			:: else -> break
			od;
			if
			:: sees_lease && n == RELAYS ->
				keeps_time[w] = true;
				kept_time = true;
				/* It might have ended since the look. */
				is_time[w] = !some_message_is(LEASED)
			:: else
			fi;
			n = 0
		};
		sleep_on_latch(w);
#ifndef CLEAR_LATE
		wake_from_sleep(w);
#else
		look();
		wake_from_sleep(w);
		if
		:: found == NOTHING -> goto falls_asleep
		:: else -> break
		fi;
#endif
next:	skip
	od;
leave:
	/* idem_await_no_more() */
	if
	:: entered[w] ->
		d_step {
			entered[w] = false;
			was_woken = woken[w];
			woken[w] = false;
			keeps_time[w] = false;
			is_time[w] = false
		};
		waiters--;
		if
#ifndef NO_HAND_ON
		:: was_woken -> wake_up(w)
#endif
#ifndef TIME_ENDS
		:: kept_time && !was_woken -> wake_up(w)
#endif
		:: else
		fi
	:: else
	fi;
	/* wake_next: it has all that it wanted, or has ended by its budget. */
	if
#ifndef NO_NEXT
	:: found == GOT && waiters > 0 -> wake_up(w)
#endif
#ifndef NO_NEXT_AT_BUDGET
	:: (found == WROTE || found == EXAMINED) && waiters > 0 -> wake_up(w)
#endif
	:: else
	fi;
	if
	:: found == GOT || found == WROTE -> end_transaction()
	:: else
	fi
}

proctype Publisher(byte m) {
	byte n, set;

#ifdef WAKE_FIRST
	if :: waiters > 0 -> wake_up(RELAYS) :: else fi;
#endif
	if
	:: message[m] = READY
	:: message[m] = PARKED			/* a row before it stands for its lane */
	fi;
#ifndef WAKE_FIRST
	if :: waiters > 0 -> wake_up(RELAYS) :: else fi
#endif
}

/* A lease ends.  The timekeeper's sleep ends, too. */
proctype Clock() {
	byte n;

end:
	do
	:: d_step {
			some_message_is(LEASED) ->
			n = 0;
			do
			:: n < MESSAGES ->
				if :: message[n] == LEASED -> message[n] = READY :: else fi;
				n++
			:: else -> break
			od;
			n = 0;
			do
			:: n < RELAYS -> is_time[n] = keeps_time[n]; n++
			:: else -> break
			od;
			n = 0
		}
	od
}

init {
	byte n = 0;

	atomic {
		do
		:: n < RELAYS -> run Relay(n); n++
		:: else -> break
		od;
		n = 0;
#ifdef LEASED_FIRST
		message[n] = LEASED;		/* by a relay that is gone */
		n++;
#endif
		do
		:: n < MESSAGES -> run Publisher(n); n++
		:: else -> break
		od;
		n = 0;
		run Clock()
	};
	atomic {
		timeout ->
		do
		:: n < RELAYS && !(asleep[n] && is_sure(n)) -> n++
		:: else -> break
		od;
		wake_up_was_lost = n < RELAYS && (some_message_is(READY) || some_message_is(PARKED));
		assert(!wake_up_was_lost)
	}
}

#else							/* CLAIMS */

bool	is_written = false;			/* the claim's end, by an open transaction */
bool	has_ended = false;			/* that is committed */

proctype Claimant(byte w) {
	byte n, set;

	do
	:: if
		:: has_ended -> break
		:: atomic { !has_ended && is_written -> !is_written }	/* idem_wait_until() */
		:: else ->
			/* committed, and within its lease: sleep_on_lease() */
			if
			:: !entered[w] -> enter(w)
			:: else -> sleep_on_latch(w); wake_from_sleep(w)
			fi
		fi
	od;
leave:
	if
	:: entered[w] -> entered[w] = false; waiters--
	:: else
	fi
}

proctype Ender() {
	byte n, set;
	bool notes;

	do
	::
#ifdef COUNT_FIRST
		notes = waiters > 0;		/* idem_claim_ends() */
		is_written = true;
#else
		is_written = true;			/* idem_update() */
		notes = waiters > 0;
#endif
		if
		:: is_written = false		/* rolled back: it tries again */
		:: d_step { is_written = false; has_ended = true };
			if :: notes -> wake_up(RELAYS) :: else fi;
			break
		:: true ->					/* PREPARE TRANSACTION */
#ifndef PREPARE_SILENT
			if :: notes -> wake_up(RELAYS) :: else fi;
#endif
			d_step { is_written = false; has_ended = true };
			break
		fi
	od
}

init {
	byte n = 0;

	atomic {
		do
		:: n < RELAYS -> run Claimant(n); n++
		:: else -> break
		od;
		n = 0;
		run Ender()
	};
	atomic {
		timeout ->
		do
		:: n < RELAYS && !asleep[n] -> n++
		:: else -> break
		od;
		wake_up_was_lost = n < RELAYS && has_ended;
		assert(!wake_up_was_lost)
	}
}

#endif
