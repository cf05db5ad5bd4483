/*
 * lanes.pml
 *		One lane of the outbox, its messages, and all calls that touch them.
 *
 * Each scan of a row, row lock, write and transaction end is a step of its own,
 * and all sessions' steps mix in every order.  A session can stop for ever
 * between two steps.  After its call it then stands for an idle or a prepared
 * transaction, which holds what it has written.
 *
 * A row has a committed version and at most one that an open transaction has
 * written.  Its time is what is left until available_at; 0 is due.  A dirty scan
 * can miss a row that moves while the scan is under way (outbox/lanes.c).
 *
 * Which function is which step:
 *
 *	Publisher			idem_publish() and idem_publish_many(): idem_lane_append(),
 *						or begins_lane() and look_at_lanes_again()
 *	Relay, taking		idem_outbox_take(): take_found(), take_lane(),
 *						take_locked(), lock_next(), take_row()
 *	Relay, answering	idem_outbox_ack(), idem_outbox_nack(),
 *						idem_outbox_extend(), idem_outbox_release() (before:
 *						give_back): find, judge and compare and swap in one step,
 *						as nothing that comes between can matter
 *	Admin				idem_outbox_requeue(), idem_outbox_ack() by anybody,
 *						delete_between() of cleanup.c
 *	is_blocked			idem_lane_is_blocked()
 *	look_again			idem_lane_look_again()
 *	left				idem_lane_left()
 *	move_signpost		idem_lane_move_signpost()
 *	give_up_signpost	idem_lane_give_up_signpost()
 *	end_transaction		a commit or a rollback
 *
 * Properties, all checked in every state that can be reached:
 *
 *	- While no call is under way, and whichever of the open transactions commit:
 *	  if a lane has a pending message, a ready row is the head or stands before
 *	  it, and is due no later (lane_was_forgotten).
 *	- A take that is alone, and comes to a lane whose head is due and not held,
 *	  takes it or declares it dead (head_was_passed_over).  So with the first
 *	  property, and with budget.pml, a due head is taken in the end.
 *	- Messages are handed out in order (order_was_broken).
 *	- No message is taken within another relay's lease, or while another
 *	  transaction writes it (two_holders).
 *	- A take parks no row that has changed since it found it (update_was_lost).
 *
 * Left out: lane marks, savepoints, REPEATABLE READ, several ids in
 * an acknowledgement, outbox_retention = 0.
 *
 * variant correct               -DN=2 -DRELAYS=1 -DFOUNDS=1 passes
 * variant correct-no-admin      -DN=2 -DRELAYS=1 -DNO_ADMIN passes
 * variant correct-two-relays    -DN=2 -DRELAYS=2 -DNO_ADMIN -DNO_ANSWERS -DFOUNDS=1 passes
 * variant correct-three         -DN=3 -DRELAYS=1 -DNO_ADMIN passes
 * variant correct-two-visits    -DN=2 -DRELAYS=1 passes large
 * variant correct-answers       -DN=2 -DRELAYS=2 -DNO_ADMIN -DFOUNDS=1 passes large
 * variant parks-and-goes        -DN=2 -DRELAYS=1 -DNO_ADMIN -DNO_LOOK_AGAIN fails lane_was_forgotten
 * variant leaves-no-signpost    -DN=2 -DRELAYS=1 -DNO_ADMIN -DNO_LEFT fails lane_was_forgotten
 * variant looks-then-leaves     -DN=2 -DRELAYS=1 -DNO_ADMIN -DLEFT_FIRST fails lane_was_forgotten
 * variant parks-behind-held     -DN=2 -DRELAYS=1 -DNO_ADMIN -DHELD_BLOCKS fails lane_was_forgotten
 * variant extends-parked        -DN=3 -DRELAYS=1 -DNO_ADMIN -DEXTEND_KEEPS fails lane_was_forgotten
 * variant parks-unready         -DN=2 -DRELAYS=1 -DNO_ADMIN -DPARKS_ALL fails lane_was_forgotten
 * variant parks-no-swap         -DN=2 -DRELAYS=1 -DFOUNDS=1 -DPARK_NO_SWAP fails update_was_lost
 * variant requeued-parked       -DN=2 -DRELAYS=1 -DFOUNDS=1 -DREQUEUE_PARKED fails lane_was_forgotten
 * variant cleaned-signpost      -DN=2 -DRELAYS=1 -DFOUNDS=1 -DCLEAN_SIGNPOSTS fails lane_was_forgotten
 * variant no-look-after-lock    -DN=2 -DRELAYS=1 -DFOUNDS=1 -DNO_RELOOK fails order_was_broken
 * variant lease-not-compared    -DN=2 -DRELAYS=1 -DNO_ADMIN -DNO_LEASE fails two_holders
 * variant takes-unlocked        -DN=2 -DRELAYS=2 -DNO_ADMIN -DNO_ANSWERS -DFOUNDS=1 -DNO_LOCK fails two_holders
 * variant takes-found-only      -DN=2 -DRELAYS=1 -DNO_ADMIN -DONLY_FOUND fails head_was_passed_over
 */
#ifndef N
#define N			2
#endif
#ifndef RELAYS
#define RELAYS		1
#endif
#ifndef FOUNDS
#define FOUNDS		2				/* ready rows that a take comes to */
#endif
/* processes that have transactions: relays, then these */
#define PUBLISHER	(RELAYS + 1)
#define ADMIN		(RELAYS + 2)
#define PROCESSES	(RELAYS + 3)

/* states of a row */
#define NONE		0
#define PENDING		1
#define ACKED		2
#define DEAD		3

/* instead of the head's number */
#define UNKNOWN		15
#define NO_HEAD		14

#define BIT(i)		(1 << (i))
#define SINCE		128				/* a set of rows is being collected */

/* the committed versions */
byte	state[N];
byte	time[N];
bit		ready[N];
bit		leased[N];
/* the others, and the transactions that have written them; 0: none */
byte	writer[N];
byte	new_state[N];
byte	new_time[N];
bit		new_ready[N];
bit		new_leased[N];
byte	locker[N];					/* of the row lock */
byte	holder[N];					/* the relay whose attempt is the last */

/*
 * Sets of rows that others have committed since this process began its call,
 * found its row or the head, and of those that were written, and written and
 * committed, since it began a dirty scan.
 */
byte	since_begin[PROCESSES];
byte	since_found[PROCESSES];
byte	since_head[PROCESSES];
byte	since_scan[PROCESSES];
byte	moved[PROCESSES];
byte	own_writes[PROCESSES];		/* by this take */
byte	head_time[PROCESSES];		/* that was read */
byte	calls = 0;					/* under way */
byte	writing = 0;				/* open transactions */
byte	alone = 0;					/* the relay whose take is, and has been so far */
byte	requeues = 1;				/* that can still happen */

hidden byte lane_was_forgotten, head_was_passed_over, order_was_broken, two_holders;
hidden byte update_was_lost;
hidden byte k, moving, h_, c_, o_;

/* A row as transaction p sees it. */
#define FREE(i, p)		((writer[i] == 0 || writer[i] == p) && (locker[i] == 0 || locker[i] == p))
#define HELD(i, p)		(writer[i] != 0 && writer[i] != p)
#define STATE(i, p)		(writer[i] == p -> new_state[i] : state[i])
#define TIME(i, p)		(writer[i] == p -> new_time[i] : time[i])
#define READY(i, p)		(writer[i] == p -> new_ready[i] : ready[i])
#define LEASED(i, p)	(writer[i] == p -> new_leased[i] : leased[i])
/* A dirty scan of a lane's pending messages finds a row, or can miss it. */
#define IN_LANE(i, p)	(STATE(i, p) == PENDING || (HELD(i, p) && new_state[i] == PENDING))
#define MISSABLE(i, p)	((moved[p] & BIT(i)) || ((since_scan[p] & BIT(i)) && STATE(i, p) != PENDING))

/*
 * What the broken variants leave out.
 */
#ifdef HELD_BLOCKS
#define blocks(i, p)		true
#else
#define blocks(i, p)		(!HELD(i, p))
#endif
#ifdef PARK_NO_SWAP
#define is_unchanged(p, i)	true
#else
#define is_unchanged(p, i)	(FREE(i, p) && !(since_found[p] & BIT(i)))
#endif
#ifdef NO_LOCK
#define can_write(i, p)		true
#else
#define can_write(i, p)		FREE(i, p)
#endif
#ifdef NO_LEASE
#define is_due(i, p)		true
#else
#define is_due(i, p)		(TIME(i, p) == 0)
#endif
#ifdef ONLY_FOUND
#define takes_head			false
#else
#define takes_head			true
#endif
#ifdef REQUEUE_PARKED
#define requeued_ready		new_ready[i]
#else
#define requeued_ready		1
#endif
#ifdef PARKS_ALL
#define head_needs_this		false
#else
#define head_needs_this		true
#endif

/*
 * The invariant, for the rows as they are if the transactions of set c_ commit
 * and all others do not.
 */
#define IF_STATE(i)	((writer[i] != 0 && (c_ & BIT(writer[i]))) -> new_state[i] : state[i])
#define IF_TIME(i)	((writer[i] != 0 && (c_ & BIT(writer[i]))) -> new_time[i] : time[i])
#define IF_READY(i)	((writer[i] != 0 && (c_ & BIT(writer[i]))) -> new_ready[i] : ready[i])

inline check_lane() {
	o_ = 0;							/* the open transactions that wrote */
	k = 0;
	do
	:: k < N -> if :: writer[k] != 0 -> o_ = o_ | BIT(writer[k]) :: else fi; k++
	:: else -> break
	od;
	c_ = 0;
	do
	:: c_ <= o_ && (c_ & ~o_) == 0 ->
		h_ = 0;
		do
		:: h_ < N && IF_STATE(h_) != PENDING -> h_++
		:: else -> break
		od;
		if
		:: h_ < N ->
			k = 0;
			do
			:: k <= h_ && !(IF_STATE(k) != NONE && IF_READY(k) && IF_TIME(k) <= IF_TIME(h_)) -> k++
			:: else -> break
			od;
			lane_was_forgotten = k > h_;
			assert(!lane_was_forgotten)
		:: else
		fi;
		c_++
	:: c_ <= o_ && (c_ & ~o_) != 0 -> c_++
	:: c_ > o_ -> break
	od;
	k = 0;
	h_ = 0;
	c_ = 0;
	o_ = 0
}

inline begin_call(p) {
	calls++;
	writing++;
	alone = 0
}

/* The call returns.  Its transaction stays open. */
inline end_call(p) {
	d_step {
		since_begin[p] = 0;
		since_found[p] = 0;
		since_head[p] = 0;
		own_writes[p] = 0;
		calls--;
		if :: calls == 0 -> check_lane() :: else fi
	}
}

/* A new version: dirty scans that have begun do not have its entry. */
#if PROCESSES > 4
#define FOR_EACH_PROCESS(do_it)	do_it(1); do_it(2); do_it(3); do_it(4)
#else
#define FOR_EACH_PROCESS(do_it)	do_it(1); do_it(2); do_it(3)
#endif
#define ADD(set, i)				set = set | (set != 0 -> BIT(i) : 0)
#define SEES_MOVE(q)			ADD(since_scan[q], moving)
#define SEES_COMMIT(q)			moved[q] = moved[q] | (since_scan[q] & BIT(k)); ADD(since_head[q], k); \
								ADD(since_found[q], k); ADD(since_begin[q], k)
#define SEES_ROLLBACK(q)		since_scan[q] = since_scan[q] & ~BIT(k)

inline moves(i) {
	moving = i;
	FOR_EACH_PROCESS(SEES_MOVE);
	moving = 0
}

/* p writes row i: a new version, equal to the current one so far. */
inline write(p, i) {
	moves(i);
	if
	:: writer[i] == p
	:: else ->
		writer[i] = p;
		new_state[i] = state[i];
		new_ready[i] = ready[i];
		new_time[i] = time[i];
		new_leased[i] = leased[i]
	fi
}

inline end_transaction(p) {
	d_step {
		k = 0;
		do
		:: k < N ->
			if
			:: writer[k] == p ->
				if
				:: commits ->
					state[k] = new_state[k];
					ready[k] = new_ready[k];
					time[k] = new_time[k];
					leased[k] = new_leased[k];
					FOR_EACH_PROCESS(SEES_COMMIT);
					if :: state[k] != PENDING || !leased[k] -> holder[k] = 0 :: else fi;
					if :: state[k] == NONE -> ready[k] = 0; time[k] = 0; leased[k] = 0 :: else fi
				:: else -> FOR_EACH_PROCESS(SEES_ROLLBACK)
				fi;
				writer[k] = 0;
				new_state[k] = 0;
				new_ready[k] = 0;
				new_time[k] = 0;
				new_leased[k] = 0
			:: else
			fi;
			if :: locker[k] == p -> locker[k] = 0 :: else fi;
			k++
		:: else -> break
		od;
			writing--;
		k = 0;
		h_ = 0;
		if :: calls == 0 -> check_lane() :: else fi
	}
}

inline begin_scan(p) {
	since_scan[p] = SINCE;
	moved[p] = 0
}

inline end_scan(p) {
	since_scan[p] = 0;
	moved[p] = 0
}

/* Backwards from row i, row by row; "blocked" is the answer. */
inline is_blocked(p, i) {
	atomic { blocked = 0; n = i; begin_scan(p) };
	do
	:: n > 0 && !blocked -> atomic {
			n--;
			if
			:: IN_LANE(n, p) && !MISSABLE(n, p) -> blocked = blocks(n, p)
			:: IN_LANE(n, p) && MISSABLE(n, p) -> if :: blocked = blocks(n, p) :: skip fi
			:: else
			fi
		}
	:: else -> break
	od;
	atomic { end_scan(p); n = 0 }
}

inline look_again(p, i) {
#ifdef NO_LOOK_AGAIN
	skip
#else
	is_blocked(p, i);
	atomic {
		if :: !blocked -> write(p, i); new_ready[i] = 1 :: else fi;
		blocked = 0
	}
#endif
}

/* Forwards for the first pending one; "head" is N if there is none. */
inline find_first(p, from) {
	atomic { head = from; begin_scan(p); since_head[p] = SINCE };
	do
	:: head < N -> atomic {
			if
			:: IN_LANE(head, p) && !MISSABLE(head, p) -> break
			:: IN_LANE(head, p) && MISSABLE(head, p) -> if :: break :: head++ fi
			:: else -> head++
			fi
		}
	:: else -> break
	od
}

/* Row i, which p has written, has left the lane. */
#ifdef NO_LEFT
#define leaves_for_held	false
#else
#define leaves_for_held	true
#endif
inline left(p, i) {
	find_first(p, i + 1);
	atomic {
		if
		:: head < N && ((HELD(head, p) && leaves_for_held) || (!HELD(head, p) && !READY(head, p))) ->
			write(p, i);
			new_ready[i] = 1;
			new_time[i] = (HELD(head, p) -> 0 : TIME(head, p))
		:: else
		fi;
		since_head[p] = 0;
		end_scan(p);
		head = 0
	}
}

/*
 * Row i becomes "to" and leaves the lane: write_end() in the same step as what
 * decides that, then see_to_lane().
 */
#ifdef LEFT_FIRST
inline write_end(i, to) {
	/* Only the row lock is there yet. */
	locker[i] = p;
	writer[i] = 0;
	new_state[i] = 0;
	new_ready[i] = 0;
	new_time[i] = 0;
	new_leased[i] = 0;
	leaves = to
}

inline see_to_lane(p, i) {
	find_first(p, i + 1);
	atomic {
		write(p, i);
		new_state[i] = leaves;
		new_leased[i] = 0;
		new_ready[i] = 0;
		if
		:: head < N && HELD(head, p) -> new_ready[i] = 1; new_time[i] = 0
		:: head < N && !HELD(head, p) && !READY(head, p) -> new_ready[i] = 1; new_time[i] = TIME(head, p)
		:: else
		fi;
		since_head[p] = 0;
		end_scan(p);
		head = 0
	}
}
#else
inline write_end(i, to) {
	new_state[i] = to;
	new_leased[i] = 0;
	new_ready[i] = 0;
	leaves = to
}

inline see_to_lane(p, i) {
	left(p, i)
}
#endif

/* A take has found row i, which is not the head, or is pending no more. */
inline move_signpost(p, i) {
	find_first(p, (seen_head == UNKNOWN -> 0 : (seen_head == NO_HEAD -> N : seen_head)));
	atomic {
		parks = 0;
		if
		:: head >= N -> seen_head = NO_HEAD; parks = 1
		:: head < N && HELD(head, p)
		:: head < N && !HELD(head, p) ->
			seen_head = head;
			head_time[p] = TIME(head, p);
			head_ready = READY(head, p);
			head_leased = LEASED(head, p);
			since_head[p] = SINCE;
			if
			:: head == i
			:: head != i && (head_ready || !head_needs_this) -> parks = 1
			:: head != i && !head_ready && head_needs_this && head_time[p] == 0
			:: head != i && !head_ready && head_needs_this && head_time[p] > 0 && !is_pending -> delays = 1
			:: head != i && !head_ready && head_needs_this && head_time[p] > 0 && is_pending ->
				if
				:: head_leased
				:: else -> readies = 1
				fi
			fi
		fi;
		end_scan(p)
	};
	/* idem_outbox_set_ready() of this row, of the head, and of this one again */
	if
	:: delays -> atomic {
			if
			:: FREE(i, p) && !(since_found[p] & BIT(i)) ->
				write(p, i);
				new_ready[i] = 1;
				new_time[i] = head_time[p]
			:: else
			fi
		}
	:: readies -> atomic {
			if
			:: FREE(head, p) && !(since_head[p] & BIT(head)) ->
				write(p, head);
				new_ready[head] = 1;
				own_writes[p] = own_writes[p] | BIT(head);
				parks = 1
			:: else
			fi
		}
	:: else
	fi;
	if
	:: parks -> atomic {
			if
			:: is_unchanged(p, i) ->
				update_was_lost = !FREE(i, p) || (since_found[p] & BIT(i));
				assert(!update_was_lost);
				write(p, i);
				new_ready[i] = 0;
				own_writes[p] = own_writes[p] | BIT(i)
			:: else -> parks = 0
			fi
		}
	:: else
	fi;
	if
	:: parks && is_pending -> look_again(p, i)
	:: else
	fi;
	atomic {
		since_head[p] = 0;
		head = 0;
		head_time[p] = 0;
		head_ready = 0;
		head_leased = 0;
		parks = 0;
		delays = 0;
		readies = 0
	}
}

/* The row is due and locked, and is handed out. */
inline take_row(p, i) {
	two_holders = TIME(i, p) > 0 || !FREE(i, p);
	assert(!two_holders);
	k = 0;
	do
	:: k < i && !(STATE(k, p) == PENDING && !(took & BIT(k)) && !(late & BIT(k))) -> k++
	:: else -> break
	od;
	order_was_broken = k < i;
	assert(!order_was_broken);
	k = 0;
	write(p, i);
	own_writes[p] = own_writes[p] | BIT(i);
	new_leased[i] = 1;
	new_ready[i] = 1;
	if :: new_time[i] = 1 :: new_time[i] = 2 fi;
	took = took | BIT(i);
	has_taken = 1
}

inline choose(i) {
	if
	:: i = 0
	:: i = 1
#if N > 2
	:: i = 2
#endif
	fi
}

/* A commit or a rollback. */
inline decide() {
	if
	:: commits = 1
	:: commits = 0
	fi
}

proctype Relay(byte p) {
	bit commits;
	byte i, n, head, seen_head, found, locked, took, seen, late, dead, due_head, leaves;
	bit blocked, parks, delays, readies, is_pending, head_ready, head_leased, ends, more, has_taken;

end:
	if
	:: atomic {						/* idem_outbox_take() */
			/* Is there a head that is due and that nobody else is at? */
			due_head = 0;
			do
			:: due_head < N && state[due_head] != PENDING -> due_head++
			:: else -> break
			od;
			if
			:: due_head < N ->
				if
				:: writing == 0 && time[due_head] == 0
				:: else -> due_head = UNKNOWN
				fi
			:: else -> due_head = UNKNOWN
			fi;
			begin_call(p);
			if :: due_head != UNKNOWN -> alone = p :: else fi;
			due_head = 0;
			since_begin[p] = SINCE;
			own_writes[p] = 0;
			seen_head = UNKNOWN
		};
		do
		:: found < FOUNDS ->
			/* take_found(): a ready row, which is due and not being written */
			atomic {
				choose(i);
				since_found[p] = SINCE;
				if
				:: !HELD(i, p) && !(own_writes[p] & BIT(i)) && STATE(i, p) != NONE && READY(i, p) &&
					TIME(i, p) == 0
				:: else -> since_found[p] = 0; break
				fi;
				found++;
				is_pending = (STATE(i, p) == PENDING)
			};
			/* take_lane() */
			if :: is_pending && (since_begin[p] & BIT(i)) -> goto next :: else fi;
			if
			:: seen_head != UNKNOWN && (!is_pending || seen_head < i) -> goto signpost
			:: else
			fi;
			atomic {
				dead = UNKNOWN;
				if
				:: is_pending && FREE(i, p) && !(since_found[p] & BIT(i)) ->
					locker[i] = p;
					locked = BIT(i);
					if :: ends = 0 :: ends = 1 fi	/* is_failing(), or has all it wanted */
				:: is_pending && !(FREE(i, p) && !(since_found[p] & BIT(i))) -> goto next
				:: !is_pending
				fi
			};
again:
			/* take_locked(), with a snapshot that is newer than the locks */
			atomic {
				since_head[p] = SINCE;
				seen = 0;
				n = 0;
				do
				:: n < N -> if :: STATE(n, p) == PENDING -> seen = seen | BIT(n) :: else fi; n++
				:: else -> break
				od;
				n = 0
			};
			do
			:: n < N -> atomic {
					if
					:: !(seen & BIT(n))
					:: (seen & BIT(n)) && !(locked & BIT(n)) ->
						if
						:: (locked >> n) != 0 && !has_taken ->	/* what was found is not the head */
							locked = 0;
							ends = !takes_head
						:: (locked >> n) != 0 && has_taken -> n = N; break
						:: else
						fi;
						if
						/* lock_next() */
						:: !ends && is_due(n, p) && !(own_writes[p] & BIT(n)) &&
							!(since_begin[p] & BIT(n)) && !(since_head[p] & BIT(n)) && can_write(n, p) ->
							locker[n] = p;
							locked = locked | BIT(n);
							more = 1;
							if :: ends = 0 :: ends = 1 fi;
#ifdef NO_RELOOK
							if :: !(took & BIT(n)) -> take_row(p, n) :: else fi
#endif
						:: else -> n = N; break
						fi
					:: (seen & BIT(n)) && (locked & BIT(n)) && (took & BIT(n))
					:: (seen & BIT(n)) && (locked & BIT(n)) && !(took & BIT(n)) ->
						/* What is committed after this look comes too late to count. */
						late = since_head[p] & ~SINCE;
						if
						:: LEASED(n, p) ->		/* take_row(): no attempt is left */
							write(p, n);
							own_writes[p] = own_writes[p] | BIT(n);
							new_state[n] = DEAD;
							new_ready[n] = 0;
							locked = locked & ~BIT(n);
							if :: dead == UNKNOWN -> dead = n :: else fi
						:: true -> take_row(p, n)
						fi
					fi;
					n++
				}
			:: else -> break
			od;
			atomic { n = 0; since_head[p] = 0; seen = 0; late = 0 };
			if :: more -> more = 0; goto again :: else fi;
			if :: dead != UNKNOWN -> left(p, dead) :: else fi;
			if
			:: !is_pending || (!has_taken && dead == UNKNOWN) -> seen_head = UNKNOWN
			:: else -> goto visited
			fi;
signpost:	move_signpost(p, i);
visited:
			/* Alone, the first visit of the call takes the head. */
			atomic {
				head_was_passed_over = alone == p && !has_taken && dead == UNKNOWN;
				assert(!head_was_passed_over);
				if :: alone == p -> alone = 0 :: else fi
			};
next:		atomic {
				dead = 0; locked = 0; is_pending = 0; ends = 0; more = 0; has_taken = 0;
				since_found[p] = 0; i = 0; n = 0
			}
		:: break
		od;
		if :: alone == p -> alone = 0 :: else fi

#ifndef NO_ANSWERS
	:: atomic {						/* an answer, by the attempt */
			choose(i);
			if
			:: holder[i] == p && FREE(i, p) -> begin_call(p); write(p, i)
			:: else -> i = 0; goto end
			fi;
			if
			:: write_end(i, ACKED)			/* ack */
			:: write_end(i, DEAD)			/* nack, after the last attempt */
			:: true ->							/* nack */
				new_ready[i] = 1;
				new_leased[i] = 0;
				new_time[i] = 1
			:: true ->							/* release */
				new_ready[i] = 1;
				new_leased[i] = 0;
				new_time[i] = 0
			:: true ->							/* extend, in the lease or after it */
				if :: new_time[i] = 1 :: new_time[i] = 2 fi;
				if :: !new_ready[i] -> is_pending = 1 :: else fi
			fi
		};
		if
		:: leaves != NONE -> see_to_lane(p, i)
#ifndef EXTEND_KEEPS
		:: is_pending -> look_again(p, i)		/* idem_lane_kept() */
#endif
		:: else
		fi
#endif
	fi;
	atomic { end_call(p); leaves = 0; is_pending = 0; found = 0; seen_head = 0; i = 0 };
	atomic {
		decide();
		end_transaction(p);
		n = 0;
		do
		:: n < N ->
			if
			:: commits && (took & BIT(n)) && state[n] == PENDING -> holder[n] = p
			:: else
			fi;
			n++
		:: else -> break
		od;
		n = 0;
		took = 0;
		commits = 0
	};
	/* A second relay takes once and is gone, for the sake of the size. */
	if
	:: p == 1 -> goto end
	:: else
	fi
}

proctype Publisher(byte p) {
	byte n;
	bit blocked, commits;

	begin_call(p);
	is_blocked(p, 1);
	atomic {
		/* All in one transaction; the second is behind the first. */
		moves(1);
			writer[1] = p;
		new_state[1] = PENDING;
		new_ready[1] = !blocked;
		if :: new_time[1] = 0 :: new_time[1] = 1 fi;
#if N > 2
		moves(2);
		writer[2] = p;
		new_state[2] = PENDING;
		new_ready[2] = 0;
		new_time[2] = new_time[1];
#endif
	};
	if :: blocked -> look_again(p, 1) :: else fi;
	atomic { end_call(p); blocked = 0 };
	atomic { decide(); end_transaction(p); commits = 0 }
}

#ifndef NO_ADMIN
proctype Admin(byte p) {
	byte i, n, head, leaves;
	bit cleans, wrote, commits;

end:
	do
	:: atomic {
			choose(i);
			if
			:: FREE(i, p) && state[i] != NONE && !(state[i] == ACKED && ready[i]) ->
				begin_call(p);
				write(p, i);
				if
				:: state[i] == DEAD && requeues > 0 ->
					requeues--;
					new_state[i] = PENDING;
					new_ready[i] = requeued_ready;
					new_leased[i] = 0;
					new_time[i] = 0
				:: state[i] == DEAD -> new_state[i] = ACKED
				:: state[i] == PENDING -> write_end(i, ACKED)
				:: state[i] == ACKED -> new_state[i] = NONE		/* idem_delete() */
				fi
			:: FREE(i, p) && state[i] == ACKED && ready[i] ->
				begin_call(p);
				since_found[p] = SINCE;
				cleans = 1
			:: else -> i = 0; goto end
			fi
		};
		if
		:: leaves != NONE -> see_to_lane(p, i)
		:: cleans ->
			/* give_up_signpost */
#ifdef CLEAN_SIGNPOSTS
			wrote = 1;
#else
			find_first(p, 0);
			atomic {
				wrote = 0;
				if
				:: head >= N -> wrote = 1
				:: head < N && HELD(head, p)
				:: head < N && !HELD(head, p) && READY(head, p) -> wrote = 1
				:: head < N && !HELD(head, p) && !READY(head, p) && !(LEASED(head, p) && TIME(head, p) > 0) &&
					FREE(head, p) && !(since_head[p] & BIT(head)) ->
					write(p, head);
					new_ready[head] = 1;
					wrote = 1
				:: else
				fi;
				since_head[p] = 0;
				end_scan(p);
				head = 0
			};
#endif
			atomic {
				if
				:: wrote && FREE(i, p) && !(since_found[p] & BIT(i)) ->
					write(p, i);
					new_state[i] = NONE;
					new_ready[i] = 0
				:: else
				fi
			}
		:: else
		fi;
		atomic { end_call(p); leaves = 0; cleans = 0; wrote = 0; i = 0 };
		atomic { decide(); end_transaction(p); commits = 0 }
	od
}
#endif

/* Time passes for all rows, committed or not. */
proctype Clock() {
end:
	do
	:: d_step {
			(time[0] + new_time[0] + time[1] + new_time[1] + time[N - 1] + new_time[N - 1] > 0) ->
			k = 0;
			do
			:: k < N ->
				if :: time[k] > 0 -> time[k]-- :: else fi;
				if :: new_time[k] > 0 -> new_time[k]-- :: else fi;
				k++
			:: else -> break
			od;
			k = 1;
			do
			:: k < PROCESSES -> if :: head_time[k] > 0 -> head_time[k]-- :: else fi; k++
			:: else -> break
			od;
			k = 0
		}
	od
}

init {
	byte n = 1;

	atomic {
		/* The first message is there. */
		state[0] = PENDING;
		ready[0] = 1;
		do
		:: n <= RELAYS -> run Relay(n); n++
		:: else -> break
		od;
		run Publisher(PUBLISHER);
#ifndef NO_ADMIN
		run Admin(ADMIN);
#endif
		run Clock();
		n = 0
	}
}
