/*-------------------------------------------------------------------------
 *
 * config.c
 *		The configuration: a file of settings, and options of the same names.
 *
 *		lease = 30s					--lease=30s
 *		[warehouse]
 *		sink = amqp					--warehouse.sink=amqp
 *
 * An option replaces the setting in the file.  Every fault is logged, with its
 * place and the fix.  The caller decides afterwards whether to start.
 *
 * A RelayConfig owns its sections and settings, and strings that were read
 * from it live as long.  relay.c reads and frees it.  Every file with settings
 * reads them here.
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
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "memory.h"
#include "text.h"

/* The settings before all sections. */
const RelaySettingDef relay_main_settings[] = {
	{"database", RELAY_TEXT, "",
	"connection string of libpq; what it lacks comes from PG... variables"},
	{"password", RELAY_TEXT, "", "of the database"},
	{"password_file", RELAY_TEXT, "",
	"file with it; a relative path names a credential of systemd"},
	{"topics", RELAY_TEXT, "",
	"topics to take, with commas; needed where a pattern stands for several"},
	{"lease", RELAY_TIME, "30s",
		"for how long messages are taken; extended while they are "
	"delivered", 1000, 86400000},
	{"wait", RELAY_TIME, "10s",
	"how long a take sleeps; at most a third of the lease", 100, 3600000},
	{"batch", RELAY_NUMBER, "200",
	"how many messages are taken at once", 1, 10000},
	{"max_messages", RELAY_NUMBER, "2000",
	"how many are held at a time", 1, 100000},
	{"max_memory", RELAY_BYTES, "64MB",
	"of the messages that are held, about", 65536, INT64_C(1) << 40},
	{"stop_timeout", RELAY_TIME, "10s",
	"how long deliveries can continue after SIGTERM", 0, 3600000},
	{"metrics", RELAY_TEXT, "",
	"address and port for /metrics, as 127.0.0.1:9464; empty: none"},
	{"log_format", RELAY_TEXT, "text", "text, or json"},
	{"verbose", RELAY_BOOL, "off", "a line for each message"},
	{NULL}
};

static const struct
{
	RelaySettingKind kind;
	const char *unit;
	double		factor;
}			units[] = {
	{RELAY_NUMBER, "", 1},
	{RELAY_TIME, "ms", 1}, {RELAY_TIME, "s", 1000},
	{RELAY_TIME, "min", 60000}, {RELAY_TIME, "m", 60000},
	{RELAY_TIME, "h", 3600000}, {RELAY_TIME, "d", 86400000},
	{RELAY_BYTES, "B", 1}, {RELAY_BYTES, "kB", 1 << 10},
	{RELAY_BYTES, "MB", 1 << 20}, {RELAY_BYTES, "GB", 1 << 30},
};

static void read_file(RelayConfig *config, const char *path, int copy);
static bool has_secret(const char *line);
static void read_line(RelayConfig *config, RelaySection **section, char *line,
					  const char *where);
static void read_option(RelayConfig *config, const char *option);
static RelaySection *get_section(RelayConfig *config, const char *name,
								 const char *where);
static void set(RelaySection *section, const char *name, const char *value,
				const char *where);
static void check_setting(RelayConfig *config, const RelaySection *section,
						  const RelaySetting *setting);
static const RelaySettingDef *find_def(const RelaySection *section,
									   const char *name);
static bool parse(const RelaySettingDef *def, const char *value,
				  int64_t *number);
static char *trim(char *string);

/*
 * Read the file that an option --config names, then all other options, and
 * check the settings before all sections.  The sections' settings are not
 * checked yet.  If "copy" is not 0, it is the descriptor of a file to read
 * instead of the one that the option names.  Returns a configuration even if
 * it has faults.  The caller releases it with relay_config_free().
 */
RelayConfig *
relay_config_read(int argc, char **argv, int copy)
{
	RelayConfig *config = relay_alloc(sizeof(RelayConfig));
	RelaySection *section = relay_alloc(sizeof(RelaySection));
	const char *path = NULL;
	int			i;

	config->main = section;
	section->where = relay_copy("the configuration");
	section->defs[0] = relay_main_settings;
	for (i = 1; i < argc; i++)
	{
		if (strncmp(argv[i], "--config=", 9) != 0)
			continue;
		/* A reload copies one file. */
		if (path)
			relay_config_fault(config, "--config", "there are two files; put "
							   "all settings into one");
		path = argv[i] + 9;
	}
	if (path)
		read_file(config, path, copy);
	for (i = 1; i < argc; i++)
	{
		if (strncmp(argv[i], "--config=", 9) != 0 &&
			strcmp(argv[i], "--check") != 0)
			read_option(config, argv[i]);
	}
	relay_config_check(config, section);
	if (strcmp(relay_section_text(section, "log_format"), "json") != 0 &&
		strcmp(relay_section_text(section, "log_format"), "text") != 0)
		relay_section_fault(config, section, "log_format",
							"\"log_format\" must be text or json");
	relay_config_read_secret(config, section, "password");
	if (config->nfaults == 0 && relay_section_number(section, "wait") * 3 >
		relay_section_number(section, "lease"))
		relay_section_fault(config, section, "wait",
							"\"wait\" is more than a third of \"lease\"; "
							"make it shorter, or the lease longer");
	return config;
}

/*
 * Read the settings of a file, or of its copy if that is not 0.
 */
static void
read_file(RelayConfig *config, const char *path, int copy)
{
	RelayText  *where = relay_text_new();
	FILE	   *file = copy ? fdopen(dup(copy), "r") : fopen(path, "r");
	RelaySection *section = config->main;
	char	   *line = NULL;
	size_t		size = 0;
	int			number = 0;
	bool		secret = false;
	struct stat status;

	if (file && copy)
		rewind(file);
	while (file && getline(&line, &size, file) >= 0)
	{
		relay_text_clear(where);
		relay_text_addf(where, "%s:%d", path, ++number);
		/* Some editors begin a file with a byte order mark. */
		if (number == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0)
			memset(line, ' ', 3);
		secret |= has_secret(line);
		read_line(config, &section, line, where->data);
	}
	if (secret && fstat(fileno(file), &status) == 0 &&
		S_ISREG(status.st_mode) && status.st_mode & S_IROTH)
		relay_config_fault(config, path, "everybody can read the passwords "
						   "in this file; run chmod o-rwx %s", path);
	if (!file || ferror(file))
		relay_config_fault(config, path, "could not be read: %s",
						   strerror(errno));
	relay_text_free(where);
	free(line);
	if (file)
		fclose(file);
}

/*
 * Return whether a line of a file seems to set a password: by its name, or in
 * a URL or a connection string.
 */
static bool
has_secret(const char *line)
{
	const char *c = line + strspn(line, " \t");
	const char *at = strstr(c, "://");

	if (*c == '#' || *c == '[')
		return false;
	at = at ? strchr(at, '@') : NULL;
	if (strncmp(c, "secret_file", 11) == 0 ||
		strncmp(c, "password_file", 13) == 0)
		return false;
	return strncmp(c, "secret", 6) == 0 || strcasestr(c, "password") || at;
}

/*
 * Read a line, which this function changes.  "section" is the current section
 * before and after.
 */
static void
read_line(RelayConfig *config, RelaySection **section, char *line,
		  const char *where)
{
	char	   *name = trim(line);
	char	   *equals = strchr(name, '=');
	size_t		length = strlen(name);

	if (!*name || *name == '#')
		return;
	if (*name == '[')
	{
		bool		valid = name[length - 1] == ']' && length >= 3 &&
			!strchr(name, '.');

		name[length - 1] = '\0';
		if (valid)
			*section = get_section(config, trim(name + 1), where);
		else
			relay_config_fault(config, where, "expected the name of a "
							   "section, without a full stop in it, "
							   "between [ and ]");
	}
	else if (!equals)
		relay_config_fault(config, where, "expected \"name = value\", "
						   "a [section], or a comment behind #");
	else
	{
		*equals = '\0';
		name = trim(name);
		if (relay_section_setting(*section, name))
			relay_config_fault(config, where, "\"%s\" is set twice, first "
							   "at %s; remove one", name,
							   relay_section_where(*section, name));
		else
			set(*section, name, trim(equals + 1), where);
	}
}

/*
 * Read an option, --name=value or --section.name=value.  main.c has checked
 * its form.
 */
static void
read_option(RelayConfig *config, const char *option)
{
	char	   *where = relay_copy(option);
	char	   *value = strchr(where, '=');
	RelaySection *section = config->main;
	char	   *name;
	char	   *stop;

	/* The value can be a secret, so "where" must not show it. */
	*value++ = '\0';
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
 * Return the section of that name.  Append it if it is new.
 */
static RelaySection *
get_section(RelayConfig *config, const char *name, const char *where)
{
	RelaySection **section = &config->main->next;

	while (*section && strcmp((*section)->name, name) != 0)
		section = &(*section)->next;
	if (!*section)
	{
		*section = relay_alloc(sizeof(RelaySection));
		(*section)->name = relay_copy(name);
		(*section)->where = relay_copy(where);
	}
	return *section;
}

/*
 * Set a setting, or replace its value.
 */
static void
set(RelaySection *section, const char *name, const char *value,
	const char *where)
{
	RelaySetting **setting = &section->settings;

	while (*setting && strcmp((*setting)->name, name) != 0)
		setting = &(*setting)->next;
	if (!*setting)
	{
		*setting = relay_alloc(sizeof(RelaySetting));
		(*setting)->name = relay_copy(name);
	}
	free((*setting)->value);
	free((*setting)->where);
	(*setting)->value = relay_copy(value);
	(*setting)->where = relay_copy(where);
}

/*
 * Release a configuration and every string that was read from it.
 */
void
relay_config_free(RelayConfig *config)
{
	RelaySection *section = config->main;

	while (section)
	{
		RelaySection *next = section->next;

		while (section->settings)
		{
			RelaySetting *setting = section->settings;

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
 * Check that a section sets only settings that exist, with valid values, and
 * all that are required.  The section's "defs" are set.  Counts the faults.
 */
void
relay_config_check(RelayConfig *config, const RelaySection *section)
{
	const RelaySetting *setting;
	const RelaySettingDef *def;
	int			i;

	for (setting = section->settings; setting; setting = setting->next)
		check_setting(config, section, setting);
	for (i = 0; i < 2; i++)
	{
		for (def = section->defs[i]; def && def->name; def++)
		{
			if (!def->standard && !relay_section_setting(section, def->name))
				relay_section_fault(config, section, def->name,
									"\"%s\" is missing: %s", def->name,
									def->help);
		}
	}
}

/*
 * Check that a setting exists and has a valid value.
 */
static void
check_setting(RelayConfig *config, const RelaySection *section,
			  const RelaySetting *setting)
{
	const RelaySettingDef *def = find_def(section, setting->name);
	int64_t		number;

	if (!def)
	{
		RelayText  *names = relay_text_new();
		int			i;

		for (i = 0; i < 2; i++)
		{
			for (def = section->defs[i]; def && def->name; def++)
				relay_text_addf(names, names->len ? ", %s" : "%s", def->name);
		}
		relay_config_fault(config, setting->where, "there is no setting "
						   "\"%s\" here; there are: %s", setting->name,
						   names->data);
		relay_text_free(names);
		return;
	}
	if (parse(def, setting->value, &number) && number >= def->min &&
		(number <= def->max || !def->max))
		return;
	switch (def->kind)
	{
		case RELAY_TIME:
			relay_config_fault(config, setting->where, "\"%s\" must be a "
							   "time from %g s to %g s, with its unit: ms, s, "
							   "min, h, d", def->name,
							   (double) def->min / 1000,
							   (double) def->max / 1000);
			break;
		case RELAY_BYTES:
			relay_config_fault(config, setting->where, "\"%s\" must be a "
							   "size of at least %lld, with its unit: B, kB, "
							   "MB, GB", def->name, (long long) def->min);
			break;
		case RELAY_BOOL:
			relay_config_fault(config, setting->where,
							   "\"%s\" must be on or off", def->name);
			break;
		default:
			relay_config_fault(config, setting->where, "\"%s\" must be a "
							   "number from %lld to %lld", def->name,
							   (long long) def->min, (long long) def->max);
	}
}

/*
 * Check that a setting, if it is not empty, names a file of certificates.
 * Counts the fault.
 */
void
relay_config_check_certificates(RelayConfig *config,
								const RelaySection *section, const char *name)
{
	const char *path = relay_section_text(section, name);
	FILE	   *file;
	char	   *line = NULL;
	size_t		size = 0;
	bool		found = false;

	if (!*path)
		return;
	file = fopen(path, "r");
	if (!file)
		relay_section_fault(config, section, name, "\"%s\" could not be "
							"read: %s", path, strerror(errno));
	while (file && !found && getline(&line, &size, file) >= 0)
		found = strncmp(line, "-----BEGIN ", 11) == 0;
	if (file && !found)
		relay_section_fault(config, section, name, "\"%s\" has no "
							"certificates; expected a file in PEM", path);
	free(line);
	if (file)
		fclose(file);
}

/*
 * If the setting "name" followed by "_file" is set, set "name" to the first
 * line of that file.  A relative path names a credential of systemd, if there
 * are any.  Counts the faults.
 */
void
relay_config_read_secret(RelayConfig *config, RelaySection *section,
						 const char *name)
{
	const char *credentials = getenv("CREDENTIALS_DIRECTORY");
	RelayText  *path = relay_text_new();
	char	   *file_name = relay_alloc(strlen(name) + 6);
	const char *value;
	FILE	   *file = NULL;
	char	   *line = NULL;
	size_t		size = 0;
	struct stat status;

	sprintf(file_name, "%s_file", name);
	value = relay_section_text(section, file_name);
	if (*value)
	{
		if (*value != '/' && credentials)
			relay_text_addf(path, "%s/", credentials);
		relay_text_add(path, value);
		file = fopen(path->data, "r");
		if (!file)
			relay_section_fault(config, section, file_name, "\"%s\" could not "
								"be read: %s", path->data, strerror(errno));
		else if (relay_section_setting(section, name))
			relay_section_fault(config, section, file_name, "\"%s\" is set, "
								"too; remove one", name);
		else if (fstat(fileno(file), &status) == 0 &&
				 S_ISREG(status.st_mode) && status.st_mode & S_IROTH)
			relay_section_fault(config, section, file_name, "everybody can "
								"read this secret; run chmod o-rwx %s",
								path->data);
		else if (getline(&line, &size, file) < 0 || !*trim(line))
			relay_section_fault(config, section, file_name,
								"\"%s\" is empty", path->data);
		else
			set(section, name, trim(line), relay_section_where(section,
															   file_name));
	}
	if (file)
		fclose(file);
	free(line);
	free(file_name);
	relay_text_free(path);
}

/*
 * Convert a list of times, which are pauses, to the text of an interval[].
 * Returns NULL if the setting is empty, or after counting a fault.  The caller
 * frees it.
 */
char *
relay_config_pauses(RelayConfig *config, const RelaySection *section,
					const char *name)
{
	static const RelaySettingDef pause = {"", RELAY_TIME, "", "", 0, 0};
	char	  **list = relay_config_list(relay_section_text(section, name));
	RelayText  *array = relay_text_new();
	char	   *pauses = NULL;
	bool		valid = true;
	int64_t		ms;
	int			i;

	for (i = 0; list[i] && valid; i++)
	{
		valid = parse(&pause, list[i], &ms);
		relay_text_addf(array, "%c%lld ms", i ? ',' : '{', (long long) ms);
	}
	if (!valid)
		relay_section_fault(config, section, name, "\"%s\" must be times "
							"with commas, with their units: ms, s, min, h, d",
							name);
	else if (i > 0)
	{
		relay_text_add_char(array, '}');
		pauses = relay_copy(array->data);
	}
	relay_text_free(array);
	relay_config_free_list(list);
	return pauses;
}

/*
 * Log a fault with its place, and count it.
 */
void
relay_config_fault(RelayConfig *config, const char *where,
				   const char *format,...)
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
 * Split a value at its commas.  Returns an array that ends with NULL, which
 * the caller releases with relay_config_free_list().
 */
char	  **
relay_config_list(const char *value)
{
	char	  **list = relay_alloc(sizeof(char *));
	char	   *copy = relay_copy(value);
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

/*
 * Release an array of strings that ends with NULL, or NULL.
 */
void
relay_config_free_list(char **list)
{
	size_t		i;

	for (i = 0; list && list[i]; i++)
		free(list[i]);
	free(list);
}

/*
 * Return the setting of that name if it is set, or NULL.
 */
const RelaySetting *
relay_section_setting(const RelaySection *section, const char *name)
{
	const RelaySetting *setting = section->settings;

	while (setting && strcmp(setting->name, name) != 0)
		setting = setting->next;
	return setting;
}

/*
 * Return where a setting is set, or where its section is if it is not set.
 */
const char *
relay_section_where(const RelaySection *section, const char *name)
{
	const RelaySetting *setting = relay_section_setting(section, name);

	return setting ? setting->where : section->where;
}

/*
 * Return the value of a setting, or its default.  Returns "" if it has
 * neither.
 */
const char *
relay_section_text(const RelaySection *section, const char *name)
{
	const RelaySetting *setting = relay_section_setting(section, name);
	const RelaySettingDef *def;

	if (setting)
		return setting->value;
	def = find_def(section, name);
	return def && def->standard ? def->standard : "";
}

/*
 * Return the value of a setting, or its default, as a number: bytes,
 * milliseconds, or 1 for "on".  The setting has been checked.
 */
int64_t
relay_section_number(const RelaySection *section, const char *name)
{
	const RelaySettingDef *def = find_def(section, name);
	int64_t		number = 0;

	if (def)
		(void) parse(def, relay_section_text(section, name), &number);
	return number;
}

/*
 * Return the definition of a setting, or NULL if it does not exist.
 */
static const RelaySettingDef *
find_def(const RelaySection *section, const char *name)
{
	size_t		prefix = strlen(RELAY_LIBRDKAFKA_PREFIX);
	int			i;

	for (i = 0; i < 2; i++)
	{
		const RelaySettingDef *def = section->defs[i];

		for (; def && def->name; def++)
		{
			if (strcmp(def->name, name) == 0 ||
				(strcmp(def->name, RELAY_LIBRDKAFKA_PREFIX "...") == 0 &&
				 strncmp(name, RELAY_LIBRDKAFKA_PREFIX, prefix) == 0))
				return def;
		}
	}
	return NULL;
}

/*
 * Convert a value of a setting to a number.  A text has the minimum.  Returns
 * false if the value is not valid.  Does not check the range.
 */
static bool
parse(const RelaySettingDef *def, const char *value, int64_t *number)
{
	char	   *end;
	double		read;
	size_t		i;

	*number = def->min;
	if (def->kind == RELAY_TEXT)
		return true;
	if (def->kind == RELAY_BOOL)
	{
		*number = strcasecmp(value, "on") == 0;
		return *number || strcasecmp(value, "off") == 0;
	}
	if (!isdigit((unsigned char) *value))
		return false;
	read = strtod(value, &end);
	end += strspn(end, " ");
	for (i = 0; i < sizeof(units) / sizeof(units[0]); i++)
	{
		if (units[i].kind != def->kind || strcmp(units[i].unit, end) != 0)
			continue;
		read *= units[i].factor;
		if (!(read < 9e18))
			return false;
		*number = (int64_t) read;
		return true;
	}
	return false;
}

/*
 * Return a string without the blanks around it.  Overwrites its end.
 */
static char *
trim(char *string)
{
	char	   *end;

	while (isspace((unsigned char) *string))
		string++;
	end = string + strlen(string);
	while (end > string && isspace((unsigned char) end[-1]))
		end--;
	*end = '\0';
	return string;
}
