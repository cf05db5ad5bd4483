/*-------------------------------------------------------------------------
 *
 * relations.c
 *		Finding the extension's relations, and checking that they are unchanged.
 *
 * The OIDs are cached for the life of the backend.  A relcache callback,
 * registered before the first OID is cached, drops an entry whenever anything
 * about its relation changes: DROP EXTENSION, ALTER TABLE, CREATE TRIGGER,
 * and so on.  The next call then looks the relation up again.  It checks that
 * a table still has the shape that the store can write to without the
 * executor, and that the numbers of a sequence ascend.
 *
 * Filling the cache takes no lock.  The entry is confirmed after the caller's
 * lock has been granted, because granting a lock delivers invalidations.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_sequence.h"
#include "catalog/pg_type_d.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/syscache.h"

#include "store/relations.h"
#include "util/compat.h"

#define MAX_KEY_COLUMNS	4

/*
 * The required form of a relation.  "shape" has a letter for the type of each
 * column, in upper case if the column is NOT NULL: b bigint, i int, z
 * timestamptz, o boolean, t text (T: COLLATE "C"), a bytea, j json, d jsonb,
 * u uuid.  A sequence or an index has no shape.  "key" are the columns of a
 * table's primary key, counted from 1; they are adjacent, and can have any
 * order in the index.  For an index, "key" are its columns, in order.
 */
typedef struct IdemRelationSpec
{
	const char *name;
	const char *shape;
	AttrNumber	key[MAX_KEY_COLUMNS + 1];
	bool		partial;		/* an index with a WHERE clause */
} IdemRelationSpec;

static const IdemRelationSpec specs[IDEM_NUM_RELATIONS] = {
	[IDEM_KEYS] = {"idem_keys", "BZzzzZIiTTTajtattjd", {10, 11}},
	[IDEM_KEYS_EXPIRES_AT] = {"idem_keys_expires_at", NULL, {6}},
	[IDEM_KEYS_RESUMABLE] = {"idem_keys_resumable", NULL, {7, 5}, true},
	[IDEM_KEYS_RESUMABLE_SCOPES] =
	{"idem_keys_resumable_scopes", NULL, {10, 7, 5}, true},
	[IDEM_CLAIM_TOKENS] = {"idem_claim_tokens", NULL},
	[IDEM_ACTION_VERSIONS] = {"idem_action_versions", "BTTT", {2, 3, 4}},
	[IDEM_USER_ACTIONS] = {"idem_user_actions", "BZOTTTT", {4, 5, 6, 7}},
	[IDEM_AGGREGATES] = {"idem_aggregates", "BT", {2}},
	[IDEM_CLIENT_SEQUENCES] = {"idem_client_sequences", "BTT", {2, 3}},
	[IDEM_TOKENS] = {"idem_tokens", "ZZTT", {3, 4}},
	[IDEM_TOKENS_EXPIRES_AT] = {"idem_tokens_expires_at", NULL, {1}},
	[IDEM_OUTBOX] = {"idem_outbox", "BbZZzIIoOUTTtDdt", {1}},
	[IDEM_OUTBOX_IDS] = {"idem_outbox_ids", NULL},
	[IDEM_OUTBOX_DUE] = {"idem_outbox_due", NULL, {4}, true},
	[IDEM_OUTBOX_TOPICS] = {"idem_outbox_topics", NULL, {12, 4}, true},
	[IDEM_OUTBOX_LANES] = {"idem_outbox_lanes", NULL, {2, 1}, true},
	[IDEM_OUTBOX_ENDED] = {"idem_outbox_ended", NULL, {5}, true},
};

/*
 * OIDs that were looked up and checked; InvalidOid: the next call looks it
 * up.
 */
static Oid	oids[IDEM_NUM_RELATIONS];

/*
 * The last known OIDs and files of the tables, even if they are out of date.
 */
static Oid	last_oids[IDEM_NUM_RELATIONS];
static Oid	last_files[IDEM_NUM_RELATIONS];

/*
 * The number of times that one of our relations has changed, as far as known.
 */
uint64		idem_relation_changes = 0;

/*
 * The same, but if the server reports only that anything can have changed
 * (which it does when this process has missed many changes of other
 * relations), a table that still has its file does not count as changed.
 */
uint64		idem_contents_changes = 0;

/* The table that is being checked; InvalidOid if it has changed meanwhile. */
static Oid	being_checked = InvalidOid;

static bool callback_registered = false;

static void forget_relation(Datum arg, Oid relid);
static Oid	index_oid(IdemRelationId id);
static Oid	look_up(IdemRelationId id);
static Oid	extension_schema(void);
static void check_shape(Relation rel, const IdemRelationSpec *spec);
static void check_sequence(Oid relid, const char *name);
static void lock_relation(Oid relid, LOCKMODE lockmode);
static char *qualified_name(Oid relid);
static bool has_primary_key(Relation rel, const AttrNumber *columns);
static bool has_shape(Relation index, Relation table,
					  const IdemRelationSpec *spec);
static char type_letter(Oid type);
pg_noreturn static void refuse(Relation rel, const char *what);

/*
 * Open one of our tables with the given lock, which the subtransaction keeps.
 *
 * Raises 42704 if the extension is not installed.  Raises 55000 for a table
 * with triggers, rules, row security, or constraints or columns that we did
 * not create, because a direct write would skip them.
 */
Relation
idem_relation_open(IdemRelationId id, LOCKMODE lockmode)
{
	for (;;)
	{
		Oid			relid = oids[id];

		if (likely(OidIsValid(relid)))
		{
			lock_relation(relid, lockmode);
			if (likely(oids[id] == relid))
				return table_open(relid, NoLock);
			idem_relation_unlock(relid, lockmode);
		}
		else
		{
			Relation	rel;

			relid = look_up(id);
			lock_relation(relid, lockmode);
			rel = try_table_open(relid, NoLock);
			if (rel != NULL && look_up(id) == relid)
			{
				/*
				 * The check itself can deliver invalidations, too late for
				 * itself.  Then the next call checks again.
				 */
				if (last_oids[id] != relid ||
					last_files[id] != rel->rd_rel->relfilenode)
					idem_contents_changes++;
				last_oids[id] = relid;
				last_files[id] = rel->rd_rel->relfilenode;
				being_checked = relid;
				check_shape(rel, &specs[id]);
				oids[id] = being_checked;
				return rel;
			}
			if (rel != NULL)
				table_close(rel, NoLock);
			idem_relation_unlock(relid, lockmode);
		}
		CHECK_FOR_INTERRUPTS();
	}
}

/*
 * Lock one of our tables on behalf of the subtransaction.  If the lock
 * belonged to a cursor's query, and that failed in a later subtransaction,
 * the lock would be released, although the rows that it protects stay.
 */
static void
lock_relation(Oid relid, LOCKMODE lockmode)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	LockRelationOid(relid, lockmode);
	CurrentResourceOwner = owner;
}

/*
 * Release a lock that idem_relation_open() took.
 */
void
idem_relation_unlock(Oid relid, LOCKMODE lockmode)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	UnlockRelationOid(relid, lockmode);
	CurrentResourceOwner = owner;
}

/*
 * Return the OID of one of our sequences, locked as nextval() will lock it.
 *
 * Raises 42704 if the extension is not installed, and 55000 for a sequence
 * whose numbers might not ascend from one call to the next in all sessions.
 */
Oid
idem_sequence_oid(IdemRelationId id)
{
	for (;;)
	{
		Oid			relid = oids[id];
		bool		is_known = OidIsValid(relid);

		if (unlikely(!is_known))
			relid = look_up(id);
		LockRelationOid(relid, RowExclusiveLock);
		if (likely(is_known && oids[id] == relid))
			return relid;
		if (!is_known && look_up(id) == relid)
		{
			/* As in idem_relation_open(). */
			being_checked = relid;
			check_sequence(relid, specs[id].name);
			oids[id] = being_checked;
			return relid;
		}
		UnlockRelationOid(relid, RowExclusiveLock);
		CHECK_FOR_INTERRUPTS();
	}
}

/*
 * Return the OID of one of our indexes, which is not locked.
 */
static Oid
index_oid(IdemRelationId id)
{
	if (unlikely(!OidIsValid(oids[id])))
		oids[id] = look_up(id);
	return oids[id];
}

/*
 * Open one of our indexes of an open table, to scan it.
 *
 * Raises 55000 for any other index.  The owner of the schema can drop ours
 * and create one with the same name on another table, even without columns of
 * these types.
 */
Relation
idem_index_open(IdemRelationId id, Relation table)
{
	for (;;)
	{
		Oid			relid = index_oid(id);
		Relation	index = try_relation_open(relid, AccessShareLock);

		if (index != NULL && has_shape(index, table, &specs[id]))
			return index;

		/* REINDEX CONCURRENTLY might have replaced it. */
		oids[id] = InvalidOid;
		if (index != NULL && index_oid(id) == relid)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("index \"%s\" has been altered", specs[id].name),
					 errhint("Drop it, and create it again as the extension's install script does.")));
		if (index != NULL)
			relation_close(index, AccessShareLock);
		CHECK_FOR_INTERRUPTS();
	}
}

/*
 * Relcache callback: something about "relid" has changed, or about any
 * relation.
 */
static void
forget_relation(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || being_checked == relid)
		being_checked = InvalidOid;
	for (int i = 0; i < IDEM_NUM_RELATIONS; i++)
	{
		if (!OidIsValid(relid) || oids[i] == relid || last_oids[i] == relid)
		{
			oids[i] = InvalidOid;
			idem_relation_changes++;
			if (OidIsValid(relid))
				idem_contents_changes++;
		}
	}
}

/*
 * Find a relation by its name in the extension's schema.
 *
 * Raises 42704 if there is no extension, 55000 if it lacks the relation.
 */
static Oid
look_up(IdemRelationId id)
{
	Oid			schema;
	Oid			relid;

	if (!callback_registered)
	{
		CacheRegisterRelcacheCallback(forget_relation, (Datum) 0);
		callback_registered = true;
	}

	schema = extension_schema();
	if (!OidIsValid(schema))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"%s\" is not installed in this database",
						"idempotency"),
				 errhint("Run CREATE EXTENSION idempotency as the database owner.")));
	relid = get_relname_relid(specs[id].name, schema);
	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("\"%s\" of extension \"%s\" is missing",
						specs[id].name, "idempotency"),
				 errhint("Create it again as the extension's install script does.")));
	return relid;
}

/*
 * Return the schema of the extension; InvalidOid if it is not installed.
 */
static Oid
extension_schema(void)
{
	Relation	extensions;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;

	extensions = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber,
				F_NAMEEQ, CStringGetDatum("idempotency"));
	scan = systable_beginscan(extensions, ExtensionNameIndexId, true,
							  NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(extensions, AccessShareLock);
	return schema;
}

/*
 * Is the extension installed in this database?
 */
bool
idem_is_installed(void)
{
	return OidIsValid(extension_schema());
}

/*
 * Raise 55000 unless the table is exactly as the install script made it, in
 * all respects on which a write without the executor depends.  Additional
 * indexes are allowed: the store maintains them.
 */
static void
check_shape(Relation rel, const IdemRelationSpec *spec)
{
	TupleDesc	desc = RelationGetDescr(rel);
	int			ncolumns = strlen(spec->shape);

	if (rel->rd_rel->relkind != RELKIND_RELATION)
		refuse(rel, "a different kind of relation");
	if (rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is unlogged",
						RelationGetRelationName(rel)),
				 errdetail("A crash would empty it."),
				 errhint("Make it permanent again with ALTER TABLE ... SET LOGGED.")));
	if (rel->trigdesc != NULL)
		refuse(rel, "a trigger or foreign key");
	if (rel->rd_rules != NULL)
		refuse(rel, "a rule");
	if (rel->rd_rel->relrowsecurity)
		refuse(rel, "row-level security");
	if (rel->rd_rel->relispartition ||
		(rel->rd_rel->relhassubclass &&
		 find_inheritance_children(RelationGetRelid(rel), NoLock) != NIL))
		refuse(rel, "inheritance");
	if (desc->constr != NULL && desc->constr->num_check > 0)
		refuse(rel, "a check constraint");
	for (int i = ncolumns; i < desc->natts; i++)
	{
		if (!TupleDescAttr(desc, i)->attisdropped)
			refuse(rel, "an added column");
	}
	if (desc->natts < ncolumns)
		refuse(rel, "a changed column");

	for (int i = 0; i < ncolumns; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		char		letter = type_letter(att->atttypid);

		if (att->attnotnull)
			letter = pg_ascii_toupper((unsigned char) letter);
		if (att->attisdropped || att->attgenerated ||
			letter != spec->shape[i] ||
			(letter == 'T' && att->attcollation != C_COLLATION_OID))
			refuse(rel, "a changed column");
	}

	if (!has_primary_key(rel, spec->key))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" has lost its primary key",
						RelationGetRelationName(rel)),
				 errhint("Create the primary key again with ALTER TABLE.")));
}

/*
 * Raise 55000 unless a sequence gives ascending numbers that never repeat.
 * It must not repeat them after a crash, cache them in sessions, or cycle.
 */
static void
check_sequence(Oid relid, const char *name)
{
	HeapTuple	tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(relid));
	Form_pg_sequence form;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("\"%s\" is not a sequence", name),
				 errhint("Create it again as the extension's install script does.")));
	if (get_rel_persistence(relid) != RELPERSISTENCE_PERMANENT)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("sequence \"%s\" is unlogged", name),
				 errdetail("A crash sets it back to its start."),
				 errhint("Make it permanent again with ALTER SEQUENCE %s SET LOGGED. If the server has crashed meanwhile, raise it above all numbers that it gave, with setval().",
						 qualified_name(relid))));
	form = (Form_pg_sequence) GETSTRUCT(tuple);
	if (form->seqtypid != INT8OID || form->seqincrement < 1 ||
		form->seqmax != PG_INT64_MAX || form->seqcache != 1 ||
		form->seqcycle)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("sequence \"%s\" has been altered", name),
				 errdetail("Its numbers must ascend in the order of calls, and never repeat."),
				 errhint("Fix it with ALTER SEQUENCE %s AS bigint INCREMENT 1 NO MAXVALUE CACHE 1 NO CYCLE.",
						 qualified_name(relid))));
	ReleaseSysCache(tuple);
}

/*
 * Return a relation's name, qualified and quoted for use in a statement.
 */
static char *
qualified_name(Oid relid)
{
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)),
									  get_rel_name(relid));
}

/*
 * Does the table have a primary key with these columns?
 */
static bool
has_primary_key(Relation rel, const AttrNumber *columns)
{
	Oid			indexid = RelationGetPrimaryKeyIndex(rel, false);
	Relation	index;
	Bitmapset  *wanted = NULL;
	Bitmapset  *present = NULL;

	if (!OidIsValid(indexid))
		return false;
	index = index_open(indexid, AccessShareLock);
	for (int i = 0; columns[i] != 0; i++)
		wanted = bms_add_member(wanted, columns[i]);
	for (int i = 0; i < IndexRelationGetNumberOfKeyAttributes(index); i++)
		present = bms_add_member(present, index->rd_index->indkey.values[i]);
	index_close(index, AccessShareLock);
	return bms_equal(wanted, present);
}

/*
 * Is this the index of that table, with the columns that we know how to scan?
 */
static bool
has_shape(Relation index, Relation table, const IdemRelationSpec *spec)
{
	int			n;

	if (index->rd_rel->relkind != RELKIND_INDEX ||
		index->rd_rel->relam != BTREE_AM_OID ||
		index->rd_index->indrelid != RelationGetRelid(table) ||
		!index->rd_index->indisvalid ||
		heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred,
					   NULL) == spec->partial)
		return false;

	for (n = 0; spec->key[n] != 0; n++)
	{
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(table),
											  spec->key[n] - 1);

		if (n >= IndexRelationGetNumberOfKeyAttributes(index) ||
			index->rd_index->indkey.values[n] != spec->key[n] ||
			index->rd_opcintype[n] != att->atttypid ||
			index->rd_indcollation[n] != att->attcollation ||
			index->rd_indoption[n] != 0)
			return false;
	}
	return n == IndexRelationGetNumberOfKeyAttributes(index);
}

/*
 * Return the name that the install script gave a relation.
 */
const char *
idem_relation_name(IdemRelationId id)
{
	return specs[id].name;
}

/*
 * Return the kind of relation that the install script created.
 */
IdemRelationKind
idem_relation_kind(IdemRelationId id)
{
	if (specs[id].shape != NULL)
		return IDEM_TABLE;
	return specs[id].key[0] != 0 ? IDEM_INDEX : IDEM_SEQUENCE;
}

/*
 * Return the number of columns that the install script gave a table.
 */
int
idem_relation_columns(IdemRelationId id)
{
	return strlen(specs[id].shape);
}

/*
 * Return the letter that stands for a type in IdemRelationSpec.shape.
 */
static char
type_letter(Oid type)
{
	switch (type)
	{
		case INT8OID:
			return 'b';
		case INT4OID:
			return 'i';
		case TIMESTAMPTZOID:
			return 'z';
		case BOOLOID:
			return 'o';
		case TEXTOID:
			return 't';
		case BYTEAOID:
			return 'a';
		case JSONOID:
			return 'j';
		case JSONBOID:
			return 'd';
		case UUIDOID:
			return 'u';
		default:
			return '?';
	}
}

/*
 * Report an altered table. "what" names the property that is not supported.
 */
static void
refuse(Relation rel, const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" has been altered",
					RelationGetRelationName(rel)),
			 errdetail("Extension \"idempotency\" accesses its tables directly and does not support %s.",
					   what),
			 errhint("Remove it with ALTER TABLE, DROP TRIGGER or DROP RULE; to react to changes, use logical replication.")));
}
