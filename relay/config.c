/*-------------------------------------------------------------------------
 *
 * config.c
 *		The configuration: a file of settings, and options of the same names.
 *
 *		lease = 30s					--lease=30s
 *		[warehouse]
 *		sink = amqp					--warehouse.sink=amqp
 *
 * An option replaces what the file says.  All faults are told, each with its
 * place and what to do, before the first one keeps the relay from starting.
 *
 *-------------------------------------------------------------------------
 */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config.h"
#include "relay.h"
#include "text.h"

/* What can be set above all sections. */
const SettingDef main_settings[] = {
	{"database", SETTING_TEXT, "", 0, 0,
	"connection string of libpq; what it lacks comes from PG... variables"},
	{"topics", SETTING_TEXT, "", 0, 0,
	"topics to take, with commas; needed where a pattern stands for several"},
	{"lease", SETTING_TIME, "30s", 1000, 86400000,
	"for how long messages are taken; extended while they are delivered"},
	{"wait", SETTING_TIME, "10s", 100, 3600000,
	"how long a take sleeps; at most a third of the lease"},
	{"batch", SETTING_NUMBER, "200", 1, 10000,
	"how many messages are taken at once"},
	{"max_messages", SETTING_NUMBER, "2000", 1, 100000,
	"how many are held at a time"},
	{"max_memory", SETTING_BYTES, "64MB", 65536, INT64_C(1) << 40,
	"of the messages that are held, about"},
	{"stop_timeout", SETTING_TIME, "10s", 0, 3600000,
	"how long deliveries may go on after SIGTERM"},
	{"metrics", SETTING_TEXT, "", 0, 0,
	"address and port for /metrics, as 127.0.0.1:9464; empty: none"},
	{"verbose", SETTING_BOOL, "off", 0, 0,
	"a line for each message"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static void read_file(Config *config, const char *path);
static void read_line(Config *config, Section **section, char *line,
					  const char *where);
static void read_option(Config *config, const char *option);
static Section *get_section(Config *config, const char *name,
							const char *where);
static void set(Section *section, const char *name, const char *value,
				const char *where);
static void check_setting(Config *config, Section *section,
						  const Setting *setting);
static const SettingDef *find_def(const Section *section, const char *name);
static bool parse(const SettingDef *def, const char *text, int64_t * value);
static char *trim(char *text);

/*
 * Read the file that an option --config names, and all other options.
 */
Config *
config_read(int argc, char **argv)
{
	Config	   *config = relay_alloc(sizeof(Config));
	int			i;

	config->main = relay_alloc(sizeof(Section));
	config->main->where = relay_copy("the configuration");
	config->main->defs[0] = main_settings;
	for (i = 1; i < argc; i++)
	{
		if (strncmp(argv[i], "--config=", 9) == 0)
			read_file(config, argv[i] + 9);
	}
	for (i = 1; i < argc; i++)
	{
		if (strncmp(argv[i], "--config=", 9) != 0 &&
			strcmp(argv[i], "--check") != 0)
			read_option(config, argv[i]);
	}
	config_check(config, config->main);
	if (config->nfaults == 0 && section_number(config->main, "wait") * 3 >
		section_number(config->main, "lease"))
		config_fault(config, section_where(config->main, "wait"),
					 "\"wait\" is more than a third of \"lease\"; "
					 "make it shorter, or the lease longer");
	return config;
}

void
config_free(Config *config)
{
	Section    *section = config->main;

	while (section)
	{
		Section    *next = section->next;

		while (section->settings)
		{
			Setting    *setting = section->settings;

			section->settings = setting->next;
			free(setting->name);
			free(setting->value);
			free(setting->where);
			free(setting);
		}
		free(section->name);
		free(section->where);
		free(section);
		section = next;
	}
	free(config);
}

/*
 * Tell of a fault, and count it.
 */
void
config_fault(Config *config, const char *where, const char *format,...)
{
	char		fault[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(fault, sizeof(fault), format, args);
	va_end(args);
	relay_log(RELAY_ERROR, "%s: %s", where, fault);
	config->nfaults++;
}

/*
 * Tell it if a setting names a file without certificates.
 */
void
config_check_certificates(Config *config, const Section *section,
						  const char *name)
{
	const char *path = section_text(section, name);
	FILE	   *file;
	char	   *line = NULL;
	size_t		size = 0;
	bool		found = false;

	if (!*path)
		return;
	file = fopen(path, "r");
	if (!file)
	{
		config_fault(config, section_where(section, name),
					 "\"%s\" could not be read: %s", path, strerror(errno));
		return;
	}
	while (!found && getline(&line, &size, file) >= 0)
		found = strncmp(line, "-----BEGIN ", 11) == 0;
	if (!found)
		config_fault(config, section_where(section, name),
					 "\"%s\" has no certificates; expected a file in PEM",
					 path);
	free(line);
	fclose(file);
}

static void
read_file(Config *config, const char *path)
{
	FILE	   *file = fopen(path, "r");
	Section    *section = config->main;
	char	   *line = NULL;
	size_t		size = 0;
	int			number = 0;

	if (!file)
	{
		config_fault(config, path, "could not be read: %s", strerror(errno));
		return;
	}
	while (getline(&line, &size, file) >= 0)
	{
		char	   *where;

		if (asprintf(&where, "%s:%d", path, ++number) < 0)
			relay_exit(RELAY_SYSTEM, "out of memory");
		read_line(config, &section, line, where);
		free(where);
	}
	if (ferror(file))
		config_fault(config, path, "could not be read: %s", strerror(errno));
	free(line);
	fclose(file);
}

static void
read_line(Config *config, Section **section, char *line, const char *where)
{
	char	   *text = trim(line);
	char	   *equals = strchr(text, '=');
	size_t		length = strlen(text);

	if (!*text ||*text == '#')
		return;
	if (*text == '[')
	{
		if (text[length - 1] != ']' || length < 3 || strchr(text, '.'))
		{
			config_fault(config, where, "expected the name of a section, "
						 "without a full stop in it, between [ and ]");
			return;
		}
		text[		length - 1] = '\0';

		*section = get_section(config, trim(text +1), where);
		return;
	}
	if (!equals)
	{
		config_fault(config, where, "expected \"name = value\", "
					 "a [section], or a comment behind #");
		return;
	}
	*equals = '\0';
	text = trim(text);

	if (section_setting(*section, text))
		config_fault(config, where, "\"%s\" is set twice, first at %s; "
					 "remove one", text, section_where(*section, text));
	else
		set(*section, text, trim(equals + 1), where);
}

static void
read_option(Config *config, const char *option)
{
	char	   *where = relay_copy(option);
	char	   *value = strchr(where, '=');
	Section    *section = config->main;
	char	   *name;
	char	   *stop;

	if (strncmp(option, "--", 2) != 0 || !value)
	{
		config_fault(config, option, "expected --name=value; "
					 "see \"idem-relay --help\"");
		free(where);
		return;
	}
	*value++ = '\0';			/* which may be a secret */
	name = relay_copy(where + 2);
	stop = strchr(name, '.');
	if (stop)
	{
		*stop++ = '\0';
		section = get_section(config, name, where);
	}
	set(section, stop ? stop : name, value, where);
	free(name);
	free(where);
}

/*
 * The section of that name, which may be a new one.
 */
static Section *
get_section(Config *config, const char *name, const char *where)
{
	Section   **section = &config->main->next;

	while (*section && strcmp((*section)->name, name) != 0)
		section = &(*section)->next;
	if (!*section)
	{
		*section = relay_alloc(sizeof(Section));
		(*section)->name = relay_copy(name);
		(*section)->where = relay_copy(where);
	}
	return *section;
}

static void
set(Section *section, const char *name, const char *value, const char *where)
{
	Setting   **setting = &section->settings;

	while (*setting && strcmp((*setting)->name, name) != 0)
		setting = &(*setting)->next;
	if (!*setting)
	{
		*setting = relay_alloc(sizeof(Setting));
		(*setting)->name = relay_copy(name);
	}
	free((*setting)->value);
	free((*setting)->where);
	(*setting)->value = relay_copy(value);
	(*setting)->where = relay_copy(where);
}

/*
 * Check all settings of a section against what there is.
 */
void
config_check(Config *config, Section *section)
{
	const Setting *setting;
	const SettingDef *def;
	int			i;

	for (setting = section->settings; setting; setting = setting->next)
		check_setting(config, section, setting);
	for (i = 0; i < 2; i++)
	{
		for (def = section->defs[i]; def && def->name; def++)
		{
			if (!def->standard && !section_setting(section, def->name))
				config_fault(config, section->where,
							 "\"%s\" is missing: %s", def->name, def->help);
		}
	}
}

static void
check_setting(Config *config, Section *section, const Setting *setting)
{
	const SettingDef *def = find_def(section, setting->name);
	int64_t		value;

	if (!def)
	{
		Text	   *names = text_new();
		int			i;

		for (i = 0; i < 2; i++)
		{
			for (def = section->defs[i]; def && def->name; def++)
				text_addf(names, names->len ? ", %s" : "%s", def->name);
		}
		config_fault(config, setting->where,
					 "there is no setting \"%s\" here; there are: %s",
					 setting->name, names->data);
		text_free(names);
		return;
	}
	if (parse(def, setting->value, &value) && value >= def->min &&
		(value <= def->max || !def->max))
		return;
	switch (def->kind)
	{
		case SETTING_TIME:
			config_fault(config, setting->where, "\"%s\" is to be a time from "
						 "%g s to %g s, with its unit: ms, s, min, h",
						 def->name, (double) def->min / 1000,
						 (double) def->max / 1000);
			break;
		case SETTING_BYTES:
			config_fault(config, setting->where, "\"%s\" is to be a size of "
						 "at least %lld, with its unit: B, kB, MB, GB",
						 def->name, (long long) def->min);
			break;
		case SETTING_BOOL:
			config_fault(config, setting->where,
						 "\"%s\" is to be on or off", def->name);
			break;
		default:
			config_fault(config, setting->where, "\"%s\" is to be a number "
						 "from %lld to %lld", def->name, (long long) def->min,
						 (long long) def->max);
	}
}

static const SettingDef *
find_def(const Section *section, const char *name)
{
	static const SettingDef passed_on = {
		LIBRDKAFKA_PREFIX, SETTING_TEXT, "", 0, 0, NULL
	};
	int			i;

	for (i = 0; i < 2; i++)
	{
		const SettingDef *def = section->defs[i];

		for (; def && def->name; def++)
		{
			if (strcmp(def->name, name) == 0)
				return def;
			if (strcmp(def->name, LIBRDKAFKA_PREFIX "...") == 0 &&
				strncmp(name, LIBRDKAFKA_PREFIX,
						strlen(LIBRDKAFKA_PREFIX)) == 0)
				return &passed_on;
		}
	}
	return NULL;
}

/*
 * Read a value of that kind; false: it is none.
 */
static bool
parse(const SettingDef *def, const char *text, int64_t * value)
{
	static const struct
	{
		SettingKind kind;
		const char *unit;
		double		factor;
	}			units[] = {
		{SETTING_TIME, "ms", 1}, {SETTING_TIME, "s", 1000},
		{SETTING_TIME, "min", 60000}, {SETTING_TIME, "h", 3600000},
		{SETTING_BYTES, "B", 1}, {SETTING_BYTES, "kB", 1024},
		{SETTING_BYTES, "MB", 1048576}, {SETTING_BYTES, "GB", 1073741824},
		{SETTING_NUMBER, "", 1},
	};
	char	   *end;
	double		number;
	size_t		i;

	*value = def->min;
	if (def->kind == SETTING_TEXT)
		return true;
	if (def->kind == SETTING_BOOL)
	{
		*value = strcasecmp(text, "on") == 0;
		return *value || strcasecmp(text, "off") == 0;
	}
	if (!isdigit((unsigned char) *text))
		return false;
	number = strtod(text, &end);
	end += strspn(end, " ");
	for (i = 0; i < sizeof(units) / sizeof(units[0]); i++)
	{
		if (units[i].kind == def->kind && strcmp(units[i].unit, end) == 0)
		{
			number *= units[i].factor;
			if (!(number < 9e18))
				return false;
			*value = (int64_t) number;
			return true;
		}
	}
	return false;
}

/*
 * What was set under that name, or NULL.
 */
const Setting *
section_setting(const Section *section, const char *name)
{
	const Setting *setting = section->settings;

	while (setting && strcmp(setting->name, name) != 0)
		setting = setting->next;
	return setting;
}

/*
 * Where that was set, or the section where it was not.
 */
const char *
section_where(const Section *section, const char *name)
{
	const Setting *setting = section_setting(section, name);

	return setting ? setting->where : section->where;
}

/*
 * The value of a setting that there is, or its default.
 */
const char *
section_text(const Section *section, const char *name)
{
	const Setting *setting = section_setting(section, name);
	const SettingDef *def;

	if (setting)
		return setting->value;
	def = find_def(section, name);
	return def && def->standard ? def->standard : "";
}

/*
 * The same of a number, a size, a time in milliseconds, or on as 1.
 */
int64_t
section_number(const Section *section, const char *name)
{
	const SettingDef *def = find_def(section, name);
	int64_t		value = 0;

	if (def)
		(void) parse(def, section_text(section, name), &value);
	return value;
}

/*
 * The elements of a list with commas, and NULL at its end.
 */
char	  **
config_list(const char *text)
{
	char	  **list = relay_alloc(sizeof(char *));
	char	   *copy = relay_copy(text);
	char	   *rest = copy;
	char	   *element;
	size_t		n = 0;

	while ((element = strsep(&rest, ",")))
	{
		element = trim(element);
		if (!*element)
			continue;
		list = relay_resize(list, (n + 2) * sizeof(char *));
		list[n++] = relay_copy(element);
		list[n] = NULL;
	}
	free(copy);
	return list;
}

void
config_free_list(char **list)
{
	size_t		i;

	for (i = 0; list && list[i]; i++)
		free(list[i]);
	free(list);
}

/*
 * Without the blanks around it; writes into the text.
 */
static char *
trim(char *text)
{
	char	   *end;

	while (isspace((unsigned char) *text))
		text	  ++;
	end = text +strlen(text);

	while (end > text &&isspace((unsigned char) end[-1]))
		end--;
	*end = '\0';
	return text;
}
