/*
 * claims.pml
 *		The record of one key: claims, takeover, checkpoints, fencing, expiry,
 *		cleanup, and claims that idem_resume() takes over.
 *
 * The record has a committed version and at most one that an open transaction
 * has written.  Every look, every lock, every write and every transaction end
 * is a step of its own, and all sessions' steps mix in every order.  A session
 * can stop for ever between two steps: it then stands for a dead client, a slow
 * worker or a prepared transaction.
 *
 * Which function is which step:
 *
 *	claim				idem_claim_in(): idem_find() and judge() in one step, then
 *						idem_key_lock(), begin_record() with
 *						idem_next_claim_token(), and the write of start_claim() or
 *						take_over(), by compare and swap
 *	claim, by a resumer	idem_resume(): the same, but only where a record is found
 *						that failed or whose lease has ended
 *	change				change_claim() with check_claim(), for idem_complete(),
 *						idem_fail(), idem_checkpoint() and idem_heartbeat(), and
 *						idem_release(): idem_find_latest() and the token in one
 *						step, then the write, which waits for another writer
 *	Cleanup				delete_between() of cleanup.c, with idem_delete()
 *	Clock				leases and records end
 *
 * A claim looks at the clock when it writes, not when it draws its token.
 *
 * Safety: the tokens of committed claims ascend.  No claim is written while
 * another one is committed and within its lease.  After a takeover has been
 * committed, nothing of an earlier holder is.  A response is never replaced
 * before it expires.  A takeover starts from the last committed checkpoint.
 * Cleanup deletes no live record.  idem_resume() stops after the last attempt.
 *
 * Liveness (LIVE): a claim that was committed is settled in the end, whichever
 * of its holders die, as long as somebody calls idem_resume() again and again:
 * it is completed, or its attempts are used up.
 *
 * variant correct               -DCLAIMANTS=2 -DCLEANUP passes
 * variant correct-resume        -DCLAIMANTS=1 -DRESUMERS=2 -DCLEANUP passes
 * variant correct-settled       -DCLAIMANTS=1 -DRESUMERS=2 -DLIVE passes
 * variant no-swap               -DCLAIMANTS=2 -DCLEANUP -DNO_SWAP fails two_holders|response_was_lost
 * variant no-swap-by-holder     -DCLAIMANTS=2 -DCLEANUP -DHOLDER_NO_SWAP fails late_holder_wrote
 * variant no-swap-by-resume     -DCLAIMANTS=1 -DRESUMERS=2 -DCLEANUP -DRESUME_NO_SWAP fails response_was_lost
 * variant token-not-compared    -DCLAIMANTS=2 -DCLEANUP -DANY_TOKEN fails late_holder_wrote
 * variant token-without-lock    -DCLAIMANTS=2 -DCLEANUP -DNO_KEY_LOCK fails token_went_back
 * variant lease-not-compared    -DCLAIMANTS=2 -DCLEANUP -DNO_LEASE fails two_holders
 * variant takeover-forgets      -DCLAIMANTS=2 -DCLEANUP -DNO_KEEP fails checkpoint_was_lost
 * variant cleanup-no-swap       -DCLAIMANTS=2 -DCLEANUP -DCLEANUP_NO_SWAP fails live_record_was_deleted
 * variant resume-for-ever       -DCLAIMANTS=1 -DRESUMERS=2 -DCLEANUP -DNO_MAX_ATTEMPTS fails too_many_attempts
 * variant key-lock-is-kept      -DCLAIMANTS=1 -DRESUMERS=2 -DLIVE -DKEEPS_LOCK fails cycle
 * variant last-not-resumed      -DCLAIMANTS=1 -DRESUMERS=2 -DLIVE -DOFF_BY_ONE fails cycle
 * variant failed-not-resumed    -DCLAIMANTS=1 -DRESUMERS=2 -DLIVE -DNOT_FAILED fails cycle
 */
#ifndef CLAIMANTS
#define CLAIMANTS 2
#endif
#ifndef RESUMERS
#define RESUMERS 0
#endif
#ifdef LIVE
#define MAX_TOKEN		6			/* no claim draws a higher one */
#define can_abort		(aborts > 0)
#define note_abort		aborts--
#else
#define MAX_TOKEN		3
#define can_abort		true
#define note_abort		skip
#endif
#define MAX_ATTEMPTS	2			/* idempotency.max_attempts */
#define PROCESSES		(CLAIMANTS + RESUMERS + 2)
#define CLEANER			(CLAIMANTS + RESUMERS + 1)

/* states of the record */
#define ABSENT		0
#define STARTED		1
#define COMPLETED	2
#define FAILED		3

typedef Record {
	byte	state;
	byte	token;
	byte	attempt;
	bool	checkpoint;				/* it has a recovery point */
	bool	in_lease;
	bool	expired
};

Record	row;						/* the committed version */
Record	written;					/* the version of an open transaction */
byte	writer = 0;					/* that transaction's process; 0: none */
bool	changed[PROCESSES];			/* committed since this process looked */
byte	key_lock = 0;				/* its holder; 0: none */
byte	last_token = 0;				/* of the sequence */
byte	expiries = 1;				/* that can still happen */
byte	aborts = 1;					/* likewise, if LIVE */

/* What the properties need to know. */
byte	committed_token = 0;		/* the highest of all committed claims */
bool	committed_checkpoint = false;	/* of this record */

hidden byte two_holders, late_holder_wrote, response_was_lost, token_went_back;
hidden byte checkpoint_was_lost, live_record_was_deleted, too_many_attempts;

#define is_settled	(row.state == COMPLETED || row.attempt >= MAX_ATTEMPTS)

#ifdef LIVE
ltl settled { [] (committed_token > 0 -> <> is_settled) }
#endif

inline copy(to, from) {
	to.state = from.state;
	to.token = from.token;
	to.attempt = from.attempt;
	to.checkpoint = from.checkpoint;
	to.in_lease = from.in_lease;
	to.expired = from.expired
}

inline clear(record) {
	record.state = ABSENT;
	record.token = 0;
	record.attempt = 0;
	record.checkpoint = false;
	record.in_lease = false;
	record.expired = false
}

/* The transaction of the version "written" commits. */
hidden byte k;
inline commit() {
	d_step {
		copy(row, written);
		clear(written);
		writer = 0;
		committed_checkpoint = row.checkpoint;
		k = 1;
		do
		:: k < PROCESSES -> changed[k] = true; k++
		:: else -> break
		od;
		k = 0
	}
}

inline abort() {
	d_step { clear(written); writer = 0 }
}

/* The write of a claim, over the row that is there. */
inline write_claim(p) {
	two_holders = row.state == STARTED && row.in_lease && !row.expired;
	assert(!two_holders);
	response_was_lost = row.state == COMPLETED && !row.expired;
	assert(!response_was_lost);
	if
	:: row.state == ABSENT || row.expired ->
		written.attempt = 1;
		written.checkpoint = false
	:: else ->
		written.attempt = row.attempt + 1;
#ifndef NO_KEEP
		written.checkpoint = row.checkpoint;
#endif
		checkpoint_was_lost = written.checkpoint != committed_checkpoint;
		assert(!checkpoint_was_lost)
	fi;
	written.state = STARTED;
	written.token = token;
	written.in_lease = true;
	written.expired = false;
	writer = p
}

/* idem_complete(), idem_fail(), idem_checkpoint(), idem_heartbeat(), idem_release() */
#define COMPLETES	1
#define FAILS		2
#define CHECKPOINTS	3
#define HEARTBEATS	4
#define RELEASES	5

inline write_change(p, what) {
	late_holder_wrote = writer != p && token != committed_token;
	assert(!late_holder_wrote);
	if
	:: writer == p					/* the claim of this transaction */
	:: else -> copy(written, row)
	fi;
	if
	:: what == COMPLETES -> written.state = COMPLETED; written.in_lease = false
	:: what == FAILS -> written.state = FAILED; written.in_lease = false
	:: what == CHECKPOINTS -> written.checkpoint = true; written.in_lease = true
	:: what == HEARTBEATS -> written.in_lease = true
	:: what == RELEASES -> clear(written)
	fi;
	writer = p
}

/*
 * What the broken variants leave out.
 */
#ifdef NO_KEY_LOCK
#define lock_is_free		true
#define take_lock(p)		skip
#else
#define lock_is_free		(key_lock == 0)
#define take_lock(p)		key_lock = p
#endif
#if defined(NO_SWAP)
#define claim_is_stale(p)	false
#elif defined(RESUME_NO_SWAP)
#define claim_is_stale(p)	(changed[p] && !resumes)
#else
/* The unique index tells whether there is a row, not whether there was one. */
#define claim_is_stale(p)	(inserts -> row.state != ABSENT : changed[p])
#endif
#ifdef HOLDER_NO_SWAP
#define change_is_stale(p)	false
#else
#define change_is_stale(p)	changed[p]
#endif
#ifdef CLEANUP_NO_SWAP
#define deletion_is_stale	false
#else
#define deletion_is_stale	changed[CLEANER]
#endif
#ifdef NO_LEASE
#define lease_is_over		true
#else
#define lease_is_over		(!row.in_lease)
#endif
#ifdef NOT_FAILED
#define can_resume_failed	false
#else
#define can_resume_failed	true
#endif
#if defined(NO_MAX_ATTEMPTS)
#define has_attempt_left	true
#elif defined(OFF_BY_ONE)
#define has_attempt_left	(row.attempt + 1 < MAX_ATTEMPTS)
#else
#define has_attempt_left	(row.attempt < MAX_ATTEMPTS)
#endif
#ifdef ANY_TOKEN
#define token_is_current	true
#else
#define token_is_current	(row.token == token)
#endif
#ifdef KEEPS_LOCK
#define unlock_at_error(p)	skip
#else
#define unlock_at_error(p)	unlock(p)
#endif

inline unlock(p) {
	if
	:: key_lock == p -> key_lock = 0
	:: else
	fi
}

proctype Session(byte p; bool resumes) {
	byte token;
	byte what;
	bool finds;
	bool inserts;

	/* Each pass of this loop is a call of idem_claim() or idem_resume(). */
end:
	do
	:: (writer == 0 && last_token < MAX_TOKEN) -> skip;
look:
		/* idem_find() and judge(); idem_key_lock(), too, as trying the lock a
		 * step later would answer the same */
		atomic {
			changed[p] = false;
			finds = false;
			if
			:: writer != 0						/* in progress */
			:: writer == 0 && resumes ->		/* of idem_resume()'s index */
				finds = ((row.state == STARTED && lease_is_over) ||
					(row.state == FAILED && can_resume_failed)) &&
					!row.expired && has_attempt_left
			:: writer == 0 && !resumes ->
				finds = row.state == ABSENT || row.expired || row.state == FAILED ||
					(row.state == STARTED && lease_is_over)
			fi;
			if
			:: finds && last_token < MAX_TOKEN -> inserts = row.state == ABSENT
			:: else -> unlock(p); goto again
			fi;
			if
			:: key_lock == p					/* since it found a stale row */
			:: key_lock != p && lock_is_free -> take_lock(p)
			:: else -> goto again
			fi
		};
		/* begin_record() */
		atomic {
			if
			:: last_token < MAX_TOKEN -> last_token++; token = last_token
			:: can_abort ->						/* an error ends the session */
				note_abort;
				unlock_at_error(p);
				break
			:: else -> unlock(p); goto again
			fi
		};
		/* idem_insert() or idem_update() */
		atomic {
			if
			:: writer != 0 ->					/* IDEM_WRITE_HELD */
				unlock(p);
				goto again
			:: writer == 0 && claim_is_stale(p) ->	/* IDEM_WRITE_STALE */
				token = 0;
				goto look
			:: else ->
				write_claim(p);
				too_many_attempts = resumes && written.attempt > MAX_ATTEMPTS;
				assert(!too_many_attempts)
			fi
		};
		/* idem_key_unlock() */
		atomic { unlock(p) };

		/* The claim's transaction does the work, too, or only commits, or ends
		 * by an error. */
		if
		:: atomic { true -> write_change(p, COMPLETES) }
		:: true
		fi;
		if
		:: atomic {
				true ->
				token_went_back = token <= committed_token;
				assert(!token_went_back);
				committed_token = token;
				commit()
			}
		:: atomic { can_abort -> note_abort; abort(); goto again }
		fi;

		/* What its holder does with a committed claim, at any later time. */
		if
		:: what = COMPLETES
		:: what = FAILS
#ifndef LIVE
		:: what = CHECKPOINTS
		:: what = HEARTBEATS
		:: what = RELEASES
#endif
		:: goto again							/* it never comes back */
		fi;
change:
		/* change_claim(): idem_find_latest() and check_claim() */
		atomic {
			changed[p] = false;
			if
			:: row.state == STARTED && !row.expired && token_is_current
			:: else -> goto again				/* ID003, ID004 */
			fi
		};
		/* idem_update() or idem_delete() */
		atomic {
			if
			:: writer != 0 -> writer == 0; goto change	/* idem_wait() */
			:: writer == 0 && change_is_stale(p) -> goto change
			:: else -> write_change(p, what)
			fi
		};
		if
		:: atomic { true -> commit() }
		:: atomic { can_abort -> note_abort; abort() }
		fi;
		if
		:: atomic { (what == CHECKPOINTS || what == HEARTBEATS) ->
			if :: what = COMPLETES :: what = FAILS fi };
			goto change
		:: else
		fi;
again:
		atomic { what = 0; token = 0; finds = false; inserts = false };
#ifdef LIVE
		/* The client is gone, and leaves its claim to the resumers. */
		if
		:: !resumes && committed_token > 0 -> break
		:: else
		fi
#endif
	od
}

#ifdef CLEANUP
proctype Cleanup() {
end:
	do
	:: atomic { row.state != ABSENT && row.expired -> changed[CLEANER] = false };
		atomic {
			if
			:: writer == 0 && row.state != ABSENT && !deletion_is_stale ->
				live_record_was_deleted = !row.expired;
				assert(!live_record_was_deleted);
				writer = CLEANER
			:: else -> goto end
			fi
		};
		if
		:: atomic { true -> commit() }
		:: atomic { true -> abort() }
		fi
	od
}
#endif

proctype Clock() {
end:
	do
	:: d_step { row.in_lease -> row.in_lease = false }
	:: d_step { written.in_lease -> written.in_lease = false }
#ifndef LIVE
	:: d_step { expiries > 0 && row.state != ABSENT && !row.expired ->
			expiries--; row.in_lease = false; row.expired = true }
#endif
	od
}

#ifdef LIVE
/* The search for cycles needs one in each run. */
active proctype Idle() {
	do
	:: true -> skip
	od
}
#endif

init {
	atomic {
		byte n = 1;
		do
		:: n <= CLAIMANTS -> run Session(n, false); n++
		:: n > CLAIMANTS && n <= CLAIMANTS + RESUMERS -> run Session(n, true); n++
		:: else -> break
		od;
#ifdef CLEANUP
		run Cleanup();
#endif
		run Clock();
		n = 0
	}
}
