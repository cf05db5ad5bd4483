/*-------------------------------------------------------------------------
 *
 * compat.h
 *		Differences between PostgreSQL's major versions.
 *
 * Only this file uses PG_VERSION_NUM.  The rest of the code is written for
 * the newest signatures; macros below provide them on older servers.  Include
 * it after the server's headers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_COMPAT_H
#define IDEMPOTENCY_COMPAT_H

#include "access/genam.h"
#include "access/tableam.h"
#include "executor/executor.h"
#include "storage/proc.h"
#include "utils/acl.h"
#include "utils/rel.h"

#if PG_VERSION_NUM < 150000
#error "idempotency needs PostgreSQL 15 or newer"
#endif

/* 16 moved the access to variable-length values out of postgres.h. */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/*
 * 19 added options to scans, updates and deletes, which we do not use, and
 * lets commands such as DROP DATABASE end background workers.
 */
#if PG_VERSION_NUM < 190000
#define BGWORKER_INTERRUPTIBLE	0
#define SO_NONE			0
#define table_beginscan_tidrange(relation, snapshot, first, last, flags) \
	table_beginscan_tidrange(relation, snapshot, first, last)
#define table_index_fetch_begin(relation, flags) \
	table_index_fetch_begin(relation)
#define table_tuple_update(relation, tid, slot, cid, options, snapshot, \
						   crosscheck, wait, failure, lockmode, indexes) \
	table_tuple_update(relation, tid, slot, cid, snapshot, \
					   crosscheck, wait, failure, lockmode, indexes)
#define table_tuple_delete(relation, tid, cid, options, snapshot, \
						   crosscheck, wait, failure) \
	table_tuple_delete(relation, tid, cid, snapshot, \
					   crosscheck, wait, failure, false)
#endif

/* 19 moved the WAL record of a sequence to another header. */
#if PG_VERSION_NUM >= 190000
#include "commands/sequence_xlog.h"
#endif

/*
 * 18 can instrument index scans, allows deferrable primary keys, and writes
 * "noreturn" before a function.
 */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, \
						flags) \
	index_beginscan(heap, index, snapshot, nkeys, norderbys)
#define RelationGetPrimaryKeyIndex(relation, deferrable_ok) \
	RelationGetPrimaryKeyIndex(relation)
#elif PG_VERSION_NUM < 190000
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, \
						flags) \
	index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys)
#endif

/* 17 also estimates the length of an array from statistics. */
#if PG_VERSION_NUM < 170000
#define estimate_array_length(root, expression) \
	estimate_array_length(expression)
#endif

/* 17 lets the caller allocate the state of a JSON lexer. */
#if PG_VERSION_NUM < 170000
#define makeJsonLexContextCstringLen(lex, json, length, encoding, escapes) \
	makeJsonLexContextCstringLen(json, length, encoding, escapes)
#endif

/*
 * 17 lets an index clean up after insertions, moved the local transaction id
 * into a struct, and the number of a process out of one.
 */
#if PG_VERSION_NUM < 170000
#define index_insert_cleanup(index, info)	((void) (info))
#define IdemLocalTransactionId()	(MyProc->lxid)
#define IdemProcNumber()			(MyProc->pgprocno)
#else
#define IdemLocalTransactionId()	(MyProc->vxid.lxid)
#define IdemProcNumber()			(MyProcNumber)
#endif

/* 17 can also look for a stronger lock. */
#if PG_VERSION_NUM < 170000
#define LockHeldByMe(tag, mode, orstronger)	LockHeldByMe(tag, mode)
#endif

/* 17 has named wait events for extensions. */
#if PG_VERSION_NUM < 170000
#define IdemWaitEvent(name)		(PG_WAIT_EXTENSION)
#else
#define IdemWaitEvent(name)		WaitEventExtensionNew(name)
#endif

/*
 * 17 gives named shared memory to any backend.  Older servers have a reserve
 * for extensions.
 */
#if PG_VERSION_NUM < 170000
#include "storage/lwlock.h"
#include "storage/shmem.h"

static inline void *
GetNamedDSMSegment(const char *name, size_t size,
				   void (*init_callback) (void *memory), bool *found)
{
	void	   *memory;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct(name, size, found);
	if (!*found)
		init_callback(memory);
	LWLockRelease(AddinShmemInitLock);
	return memory;
}
#define IDEM_MEMORY_ON_DEMAND	false
#define IdemReserveNamedDSMSegment(size)	RequestAddinShmemSpace(size)
#else
#include "storage/dsm_registry.h"

/*
 * 19 passes an argument to the callback.  Here the callback is that of older
 * servers.
 */
#if PG_VERSION_NUM >= 190000
static inline void
IdemInitSegment(void *memory, void *init_callback)
{
	((void (*) (void *)) init_callback) (memory);
}
#define GetNamedDSMSegment(name, size, init_callback, found) \
	GetNamedDSMSegment(name, size, IdemInitSegment, found, \
					   (void *) (init_callback))
#endif
#define IDEM_MEMORY_ON_DEMAND	true
#define IdemReserveNamedDSMSegment(size)	((void) (size))
#endif

/*
 * A place at which a test can make a session fail or wait, on servers of 17
 * and later that were built with injection points.  18 added an argument.
 */
#ifndef USE_INJECTION_POINTS
#define IDEM_INJECTION_POINT(name)	((void) 0)
#else
#include "utils/injection_point.h"
#if PG_VERSION_NUM < 180000
#define IDEM_INJECTION_POINT(name)	INJECTION_POINT(name)
#else
#define IDEM_INJECTION_POINT(name)	INJECTION_POINT(name, NULL)
#endif
#endif

/* Early minor releases of 15 cannot mark a half-dropped database. */
#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB	(-2)
#endif

/* 16 renamed the "node" of a relation's file to "locator". */
#if PG_VERSION_NUM < 160000
#define locator			node
#define rd_locator		rd_node
#endif

/* Before 17 no interval is infinite. */
#if PG_VERSION_NUM < 170000
#define INTERVAL_NOT_FINITE(interval)	((void) (interval), false)
#endif

/* 16 returns the number of settings together with them. */
#if PG_VERSION_NUM < 160000
#include "utils/guc_tables.h"

static inline struct config_generic **
IdemGucVariables(int *count)
{
	*count = GetNumConfigOptions();
	return get_guc_variables();
}
#define get_guc_variables(count) IdemGucVariables(count)
#endif

/* Since 16, updates can maintain summarizing indexes only. */
#if PG_VERSION_NUM < 160000
typedef bool TU_UpdateIndexes;

#define TU_None			false
#define IdemOnlySummarizing(indexes)	false
#define object_aclcheck(classid, objectid, roleid, mode) \
	((classid) == ProcedureRelationId ? \
	 pg_proc_aclcheck(objectid, roleid, mode) : \
	 (AssertMacro((classid) == NamespaceRelationId), \
	  pg_namespace_aclcheck(objectid, roleid, mode)))
#else
#define IdemOnlySummarizing(indexes)	((indexes) == TU_Summarizing)
#endif

/*
 * How a row is entered into the indexes: 19 takes flags; since 16,
 * summarizing indexes can be the only ones.
 */
#if PG_VERSION_NUM < 190000
#define EIIT_IS_UPDATE			(1 << 0)
#define EIIT_NO_DUPE_ERROR		(1 << 1)
#define EIIT_ONLY_SUMMARIZING	(1 << 2)
#if PG_VERSION_NUM < 160000
#define ExecInsertIndexTuples(relinfo, estate, flags, slot, arbiters, \
							  conflict) \
	ExecInsertIndexTuples(relinfo, slot, estate, \
						  ((flags) & EIIT_IS_UPDATE) != 0, \
						  ((flags) & EIIT_NO_DUPE_ERROR) != 0, \
						  conflict, arbiters)
#else
#define ExecInsertIndexTuples(relinfo, estate, flags, slot, arbiters, \
							  conflict) \
	ExecInsertIndexTuples(relinfo, slot, estate, \
						  ((flags) & EIIT_IS_UPDATE) != 0, \
						  ((flags) & EIIT_NO_DUPE_ERROR) != 0, \
						  conflict, arbiters, \
						  ((flags) & EIIT_ONLY_SUMMARIZING) != 0)
#endif
#endif

/*
 * The memory that a check hook leaves for its assign hook: before 16 the
 * server frees it with free().
 */
#if PG_VERSION_NUM < 160000
#define guc_malloc(elevel, size)	malloc(size)
#endif

#endif							/* IDEMPOTENCY_COMPAT_H */
