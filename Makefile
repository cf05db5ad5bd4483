# idempotency: race-free idempotency for PostgreSQL
#
#	make demo			see it work, on a throwaway server
#	make playground		a page to try it on, on a throwaway server
#	make check			run all tests, on throwaway servers
#	make clients		run the tests of the clients for Node and Python
#	make matrix			run them on all majors of PostgreSQL, as root
#	make inject			run tests that stop sessions in mid-step, on a PostgreSQL 17 built for that
#	make mutants		break the extension in many ways, and see that make check notices
#	make static			look for faults without running anything
#	make sanitize		run tests with the module's memory and arithmetic watched
#	make valgrind		run them under valgrind, on that PostgreSQL 17, for hours
#	make fuzz			throw documents at canonical JSON for ten minutes
#	make scale-out		run the tests of a router and four shards, with PL/Proxy and PgBouncer
#	make torture		crash a server under load for about an hour, and look for damage
#	make failover		take the primary away from its clients 200 times, and look for anything lost
#	make bench			measure against hand-written SQL, on a throwaway server
#	make relay			build idem-relay, the daemon that delivers what lies in the outbox
#	make relay-check	run its tests, on a RabbitMQ, a Kafka and a PostgreSQL of their own
#	make relay-bench	measure it, beside a poller of a table
#	make dist			the archive for PGXN, of what is committed
#	make deb			packages for Debian
#	make packages-check	build these, install them where nothing else is, upgrade them; as root
#	make monitoring-check	run the tests of monitoring/, with Debian's exporters and Prometheus
#	make monitoring-picture	draw the dashboard for the docs, from two minutes of load
#	make				build, for the server that pg_config belongs to
#	make install		install there
#	make volume			install into a directory of its own, VOLUME=...
#	make relay-install	install idem-relay
#	make installcheck	run the regression tests on a server that is running
#
# All but the last five first install what they need and is missing, through apt.

EXTENSION = idempotency
MODULE_big = $(EXTENSION)
OBJS = $(patsubst %.c,%.o,$(wildcard src/*.c))

# One room per primitive: the install script is these files, in this order, and a
# check that all is there as written.
ROOMS = idempotency arrays request_hash keys key_batches run actions action_batches sequences once outbox storage cleanup recovery stats monitoring access
EXTVERSION := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" $(EXTENSION).control)
SCRIPT = $(EXTENSION)--$(EXTVERSION).sql
# The last version that was released, and the way from it to this one, which is
# src/step.sql; see CONTRIBUTING.md.  None yet.
LAST_RELEASE =
STEP = $(LAST_RELEASE:%=$(EXTENSION)--%--$(EXTVERSION).sql)
DATA = $(wildcard released/*.sql)
DATA_built = $(SCRIPT) $(STEP)

REGRESS = $(patsubst sql/%.sql,%,$(sort $(wildcard sql/*.sql)))
REGRESS_OPTS = --encoding=UTF8
ISOLATION = $(patsubst test/isolation/specs/%.spec,%,$(sort $(wildcard test/isolation/specs/*.spec)))
ISOLATION_OPTS = --inputdir=test/isolation --outputdir=test/isolation --load-extension=$(EXTENSION)

# These work without a server installation, and PGXS has a "check" of its own.
OUR_GOALS = demo playground check clients matrix inject mutants static sanitize valgrind fuzz scale-out torture failover bench relay relay-install relay-check relay-bench dist deb packages-check monitoring-check monitoring-picture
ifneq ($(filter $(OUR_GOALS),$(MAKECMDGOALS)),)

PROGRAM_demo = examples/demo
PROGRAM_check = test/check
# MINUTES=5 for a shorter run; see the program for more.
PROGRAM_torture = test/torture/run

.PHONY: $(OUR_GOALS)
demo check torture:
	@test/prepare
	@test/cluster $(PROGRAM_$@)

# ROUNDS=20 for a shorter run; see test/failover/run for more.
failover:
	@test/prepare failover
	@test/cluster test/failover/run

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

# MINUTES=60 for a longer run; see test/fuzz/run.
fuzz:
	@test/prepare fuzz
	@test/fuzz/run

# LOADS="claim_new replay" measures only these; see test/bench/run for more.
bench:
	@test/prepare bench
	@csv=$${CSV:-$$(mktemp --suffix=.csv)}; \
	test/cluster test/bench/run $(LOADS) >"$$csv" && test/bench/table "$$csv"; status=$$?; \
	echo "Raw figures: $$csv"; exit $$status

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
		test/cluster test/monitoring/check && cp $$directory/monitoring.svg docs/images/; status=$$?; \
	rm -rf $$directory; exit $$status

relay-bench: relay
	@test/cluster test/relay/bench

dist:
	@packages/dist

deb:
	@test/prepare deb
	@packages/deb

# MAJORS="15 17" and STEPS restrict it; see test/packages/check.
packages-check:
	@test/prepare packages
	@test/packages/check

else

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
PG_CFLAGS += -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers
include $(PGXS)

$(OBJS): $(wildcard src/*.h)

all: $(DATA_built)
$(SCRIPT): $(ROOMS:%=src/%.sql) src/complete.sql
	cat $^ > $@

ifneq ($(STEP),)
$(STEP): src/idempotency.sql src/step.sql src/complete.sql
	cat $^ | sed '1 s/CREATE EXTENSION $(EXTENSION)/ALTER EXTENSION $(EXTENSION) UPDATE/' > $@
endif

# With VOLUME=/mnt/idempotency, say, the settings of a server from 18 on are
#	extension_control_path = '/mnt/idempotency/share:$$system'
#	dynamic_library_path = '/mnt/idempotency/lib:$$libdir'
.PHONY: volume
volume:
	@test -n "$(VOLUME)" || { echo 'Say where: make volume VOLUME=/mnt/idempotency' >&2; exit 1; }
	$(MAKE) install datadir='$(VOLUME)/share' pkglibdir='$(VOLUME)/lib' docdir='$(VOLUME)/doc' with_llvm=no

EXTRA_CLEAN += $(DATA_built) test/isolation/output_iso test/isolation/results tmp_check

endif
