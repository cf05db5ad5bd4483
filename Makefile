# idempotency: race-free idempotency for PostgreSQL
#
# Try it, on throwaway servers:
#	make demo			see it work
#	make playground		a page with three shops and a network that fails
#	make try			write a page into try/ in which the guide's SQL runs, with PGlite
#
# Test it, on throwaway servers:
#	make check			all tests of the extension
#	make clients		the clients for Node and Python
#	make relay-check	the relay, on a RabbitMQ, a Kafka and a PostgreSQL of their own
#	make monitoring-check	exporters, alert rules and dashboard, with Debian's Prometheus
#	make scale-out		a router and four shards, with PL/Proxy and PgBouncer
#	make failover		200 failovers under load; searches for lost records
#	make torture		an hour of crashes under load; searches for damage
#	make matrix			all majors of PostgreSQL, as root
#	make models			search all interleavings of small models of the protocols, with spin
#	make portable-check		the same suites for the portable edition, without the library
#	make lint			format, layers and the linters of every language
#	make static			compilers' warnings, clang-tidy, cppcheck, gcc -fanalyzer
#	make sanitize		AddressSanitizer and UndefinedBehaviorSanitizer
#	make valgrind		valgrind, on a PostgreSQL 17 with assertions; takes hours
#	make inject			stop sessions between any two steps, on that PostgreSQL 17
#	make mutants		break the code on purpose; the tests must notice
#	make fuzz			random input for canonical JSON and for the relay's parsers, for 14 minutes
#
# Measure it:
#	make bench			ratios to hand-written SQL, on a throwaway server
#	make portable-bench	the portable edition beside the C edition and hand-written PL/pgSQL
#	make relay-bench	the relay beside a program that polls a table
#	make monitoring-picture	draw the dashboard for the docs, from two minutes of load
#
# Package it:
#	make dist			the archive for PGXN, of the committed tree
#	make deb			packages for Debian
#	make site			the pages as a site with a search, into site/
#	make packages-check	build, install and upgrade the packages on fresh systems, as root
#
# Install it:
#	make portable		write the portable edition's scripts into portable/build, without a server
#	make				build, for the server of pg_config
#	make install		install there
#	make installcheck	run the regression tests on a running server
#	make volume			install into a directory of its own, VOLUME=...
#	make relay			build idem-relay, the daemon that delivers outbox messages
#	make relay-install	install idem-relay
#
# Every target above "Install it" first installs missing tools through apt, and so does relay.

EXTENSION = idempotency
MODULE_big = $(EXTENSION)
# The folder of this file.  A build out of tree calls make elsewhere with -f.
TREE := $(patsubst %/,%,$(dir $(firstword $(MAKEFILE_LIST))))
OBJS = $(patsubst $(TREE)/%.c,%.o,$(wildcard $(TREE)/src/*.c $(TREE)/src/*/*.c))

# The install script consists of these files, in this order.
SQL_FILES = install/preflight util/arrays hash/request_hash keys/keys keys/key_batches keys/resume keys/run \
	actions/actions actions/action_batches sequences/client_sequences tokens/once outbox/outbox \
	install/storage maintenance/cleanup maintenance/recovery stats/stats monitoring/monitoring \
	install/access install/install_check
EXTVERSION := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" $(TREE)/$(EXTENSION).control)
SCRIPT = $(EXTENSION)--$(EXTVERSION).sql
# The SQL version before this one; install/upgrade.sql leads from it to this one.
# packages/release writes this line; see CONTRIBUTING.md.
LAST_RELEASE =
ifneq ($(LAST_RELEASE),)
ifeq ($(wildcard $(TREE)/released/$(EXTENSION)--$(strip $(LAST_RELEASE)).sql),)
$(error released/$(EXTENSION)--$(strip $(LAST_RELEASE)).sql, the script of LAST_RELEASE, does not exist)
endif
endif
UPGRADE = $(LAST_RELEASE:%=$(EXTENSION)--%--$(EXTVERSION).sql)
UPGRADE_FILES = install/preflight install/upgrade install/install_check
DATA_built = $(SCRIPT) $(UPGRADE)
# The frozen scripts of this version are those that are built: 060_upgrades compares them.
DATA = $(filter-out $(DATA_built:%=released/%),$(patsubst $(TREE)/%,%,$(wildcard $(TREE)/released/*.sql)))

# Not editions, which needs the scripts of the portable edition; test/cluster makes them.
REGRESS = $(filter-out editions,$(patsubst $(TREE)/sql/%.sql,%,$(sort $(wildcard $(TREE)/sql/*.sql))))
REGRESS_OPTS = --encoding=UTF8
ISOLATION = $(patsubst $(TREE)/test/isolation/specs/%.spec,%,$(sort $(wildcard $(TREE)/test/isolation/specs/*.spec)))
ISOLATION_OPTS = --inputdir=$(TREE)/test/isolation --outputdir=test/isolation --load-extension=$(EXTENSION)

# These work without a server installation, and PGXS has a "check" of its own.
# So they run without PGXS, and a second make runs the other goals of the call.
DEV_GOALS = portable portable-check portable-bench try demo playground check models clients matrix inject mutants lint static sanitize valgrind fuzz scale-out torture failover bench bench-clients relay relay-install relay-check relay-bench dist deb site packages-check monitoring-check monitoring-picture
ifneq ($(filter $(DEV_GOALS),$(MAKECMDGOALS)),)

PGXS_GOALS = $(filter-out $(DEV_GOALS),$(MAKECMDGOALS))
.PHONY: $(PGXS_GOALS)
$(PGXS_GOALS):
	@$(MAKE) --no-print-directory $@

PROGRAM_demo = examples/demo
PROGRAM_check = test/check
# MINUTES=5 for a shorter run; see the program for more.
PROGRAM_torture = test/torture/run

.PHONY: $(DEV_GOALS)
demo check torture:
	@test/prepare
	@test/cluster $(PROGRAM_$@)

portable:
	@portable/generate portable/build

portable-check:
	@test/prepare portable
	@EDITION=portable test/cluster test/check $(SUITES)
	@test -n "$(SUITES)" || test/pglite/run

# ROUNDS=1 SECONDS_EACH=1 for a shorter run
portable-bench:
	@test/prepare
	@test/cluster test/bench/portable

# ROUNDS=20 for a shorter run; see test/failover/run for more.
failover:
	@test/prepare failover
	@test/cluster test/failover/run

# The page consists of files only; any web server can serve it.
try:
	@examples/try/build try

# PORT=8080 for that port; Ctrl-C ends it.
playground:
	@test/prepare playground
	@test/cluster examples/playground/run

# SUITES and SHOPS restrict it; see test/clients.
clients:
	@test/prepare clients
	@test/cluster test/clients $(SUITES)

# SECONDS=600 for a longer run, TESTS restricts it; see test/scale_out/run.
scale-out:
	@test/prepare scale-out
	@test/cluster test/scale_out/run $(if $(SECONDS),SECONDS=$(SECONDS))

# MAJORS="15 17" runs only these; see test/matrix for more.
matrix:
	@test/prepare matrix
	@test/matrix

# TESTS and SUITES restrict it; see test/inject/run.
inject:
	@test/prepare inject
	@server=$$(test/source_server) && PG_CONFIG=$$server test/cluster test/inject/run

# MUTANTS="token lease" tries only those whose name contains one of these words.
mutants:
	@test/prepare
	@test/mutants/run $(MUTANTS)

# MODELS="lanes wake:correct" runs only these; see test/models/run.
models:
	@test/prepare models
	@test/models/run $(MODELS)

lint:
	@test/prepare lint
	@test/prepare inject
	@test/static format gcc clang layers columns
	@test/lint

static:
	@test/prepare static
	@test/prepare inject
	@test/static

# SUITES and TESTS restrict these; see test/memory.
sanitize:
	@test/prepare
	@test/memory sanitize $(SUITES)

valgrind:
	@test/prepare inject
	@server=$$(test/source_server) && PG_CONFIG=$$server test/memory valgrind $(SUITES)

# MINUTES=60 for a longer run of each; see test/fuzz/run and test/fuzz/relay/run.
fuzz:
	@test/prepare fuzz
	@test/prepare relay
	@test/fuzz/run
	@test/fuzz/relay/run

# LOADS="claim_new replay" measures only these; see test/bench/run for more.
bench:
	@test/prepare bench
	@csv=$${CSV:-$$(mktemp --suffix=.csv)}; \
	test/cluster test/bench/run $(LOADS) >"$$csv" && test/bench/table "$$csv"; status=$$?; \
	echo "Raw figures: $$csv"; exit $$status

# The clients beside the same work without them, in turns; five minutes.
bench-clients:
	@SIDES="without driver" ROUNDS=$${ROUNDS:-2} $(MAKE) --no-print-directory bench LOADS="http_new http_replay client_node client_python"

relay:
	@test/prepare relay
	@$(MAKE) --no-print-directory -C relay

relay-install:
	@$(MAKE) --no-print-directory -C relay install

# QUICK=1 for a short run; SIZE, KEYS, KILLS, STOPS, CRASHES and TESTS: see test/relay/run.
relay-check:
	@test/prepare relay
	@test/cluster test/relay/check

# SECONDS_OF_LOAD and TESTS: see test/monitoring/run.
monitoring-check:
	@test/prepare monitoring
	@test/cluster test/monitoring/check

monitoring-picture:
	@test/prepare monitoring
	@directory=$$(mktemp -d) && chmod 777 $$directory && \
	TESTS="start dashboard picture" SECONDS_OF_LOAD=$${SECONDS_OF_LOAD:-120} PICTURE=$$directory/monitoring.svg \
		test/cluster test/monitoring/check && cp $$directory/monitoring*.svg docs/images/; status=$$?; \
	rm -rf $$directory; exit $$status

relay-bench: relay
	@test/cluster test/relay/bench

dist:
	@packages/dist

deb:
	@test/prepare deb
	@packages/deb

# SOURCES=URL links files that are not pages; see packages/site.
site:
	@test/prepare site
	@packages/site

# MAJORS="15 17" and STEPS restrict it; see test/packages/check.
packages-check:
	@test/prepare packages
	@test/packages/check

else

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
PG_CPPFLAGS += -I$(srcdir)/src
PG_CFLAGS += -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers
# PGXS looks at whether this is set, so it stands before the include.
EXTRA_CLEAN = test/isolation/output_iso test/isolation/results test/isolation/regression.diffs \
	test/isolation/regression.out tmp_check \
	$(wildcard src/*.o src/*/*.o src/*.bc src/*/*.bc)
include $(PGXS)

$(OBJS) $(OBJS:.o=.bc): $(wildcard $(TREE)/src/*/*.h)
ifneq ($(TREE),.)
$(shell $(MKDIR_P) $(sort $(dir $(OBJS))))
endif

all: $(DATA_built)
$(SCRIPT): $(SQL_FILES:%=src/%.sql)
	cat $^ > $@

ifneq ($(UPGRADE),)
$(UPGRADE): $(UPGRADE_FILES:%=src/%.sql)
	cat $^ | sed '1 s/CREATE EXTENSION $(EXTENSION)/ALTER EXTENSION $(EXTENSION) UPDATE/' > $@
endif

# With VOLUME=/mnt/idempotency, say, the settings of a server from 18 on are
#	extension_control_path = '/mnt/idempotency/share:$$system'
#	dynamic_library_path = '/mnt/idempotency/lib:$$libdir'
.PHONY: volume
volume:
	@test -n "$(VOLUME)" || { echo 'Say where: make volume VOLUME=/mnt/idempotency' >&2; exit 1; }
	@test "$(MAJORVERSION)" -ge 18 || { echo 'PostgreSQL $(MAJORVERSION) has no extension_control_path, which a volume needs: it came with 18' >&2; exit 1; }
	$(MAKE) install datadir='$(VOLUME)/share' pkglibdir='$(VOLUME)/lib' docdir='$(VOLUME)/doc' with_llvm=no

endif
