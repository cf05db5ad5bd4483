/*-------------------------------------------------------------------------
 *
 * json.c
 *		Write and read the members of a JSON object.
 *
 * The headers of messages come from the server, which prints jsonb, so they
 * are valid JSON.  The answers that sink_nats.c reads can be anything.  No
 * function reads past the end of its input.
 *
 * This file owns no state.  event.c writes with it.  The sinks read headers
 * and answers with it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "json.h"

static const char *skip_blanks(const char *at);
static const char *skip_value(const char *at);
static const char *read_string(const char *at, RelayText *to);
static const char *read_escape(const char *at, RelayText *to);
static unsigned read_hex(const char *at);
static void add_utf8(RelayText *to, unsigned code);

/*
 * Append a member, whose value is a UTF-8 string, or null if that is NULL.
 * The character "before" it opens the object, or is a comma.  The name needs
 * no escapes.
 */
void
relay_json_add_member(RelayText *to, char before, const char *name,
					  const char *string)
{
	relay_text_addf(to, "%c\"%s\":", before, name);
	if (!string)
	{
		relay_text_add(to, "null");
		return;
	}
	relay_text_add_char(to, '"');
	for (; *string; string++)
	{
		if (*string == '"' || *string == '\\')
			relay_text_add_char(to, '\\');
		if ((unsigned char) *string < ' ')
			relay_text_addf(to, "\\u%04x", (unsigned char) *string);
		else
			relay_text_add_char(to, *string);
	}
	relay_text_add_char(to, '"');
}

/*
 * Read the next member of an object into "name" and "value", and advance "at",
 * which points to the object before the first call.  A string value is
 * unescaped; any other value is copied unchanged.  Returns false if there are
 * no more members, or if "at" is not an object.
 */
bool
relay_json_read_member(const char **at, RelayText *name, RelayText *value)
{
	const char *c = skip_blanks(*at);

	relay_text_clear(name);
	relay_text_clear(value);
	if (*c != '{' && *c != ',')
		return false;
	c = skip_blanks(c + 1);
	if (*c != '"')
		return false;
	c = skip_blanks(read_string(c, name));
	if (*c != ':')
		return false;
	c = skip_blanks(c + 1);
	if (*c == '"')
		c = read_string(c, value);
	else
	{
		const char *end = skip_value(c);

		relay_text_add_bytes(value, c, (size_t) (end - c));
		c = end;
	}
	*at = c;
	return true;
}

/*
 * Return the position behind the blanks at "at".
 */
static const char *
skip_blanks(const char *at)
{
	return at + strspn(at, " \t\r\n");
}

/*
 * Return the position behind a value that is not a string.
 */
static const char *
skip_value(const char *at)
{
	int			depth = 0;

	while (*at)
	{
		if (*at == '"')
		{
			at = read_string(at, NULL);
			continue;
		}
		if (*at == '{' || *at == '[')
			depth++;
		else if (depth == 0 && (*at == ',' || *at == '}' || *at == ']'))
			break;
		else if (*at == '}' || *at == ']')
			depth--;
		at++;
	}
	return at;
}

/*
 * Return the position behind the string that begins at "at".  Append its
 * unescaped characters to "to", unless that is NULL.
 */
static const char *
read_string(const char *at, RelayText *to)
{
	for (at++; *at && *at != '"';)
	{
		if (*at == '\\' && at[1])
			at = read_escape(at + 1, to);
		else
		{
			if (to)
				relay_text_add_char(to, *at);
			at++;
		}
	}
	return *at ? at + 1 : at;
}

/*
 * Read an escape whose backslash is before "at", as read_string() does.
 */
static const char *
read_escape(const char *at, RelayText *to)
{
	static const char letters[] = "bfnrt";
	static const char meanings[] = "\b\f\n\r\t";
	const char *letter = strchr(letters, *at);

	if (*at == 'u' && strspn(at + 1, "0123456789abcdefABCDEF") >= 4)
	{
		unsigned	code = read_hex(at + 1);

		at += 5;
		/* A surrogate pair stands for one character. */
		if (code >= 0xd800 && code < 0xdc00 && at[0] == '\\' && at[1] == 'u' &&
			strspn(at + 2, "0123456789abcdefABCDEF") >= 4)
		{
			code = 0x10000 + ((code - 0xd800) << 10) +
				((read_hex(at + 2) - 0xdc00) & 0x3ff);
			at += 6;
		}
		if (to)
			add_utf8(to, code);
		return at;
	}
	if (to)
		relay_text_add_char(to, letter ? meanings[letter - letters] : *at);
	return at + 1;
}

/*
 * Return the value of four hexadecimal digits.
 */
static unsigned
read_hex(const char *at)
{
	char		digits[5] = {0};

	memcpy(digits, at, 4);
	return (unsigned) strtoul(digits, NULL, 16);
}

/*
 * Append a code point in UTF-8.
 */
static void
add_utf8(RelayText *to, unsigned code)
{
	static const unsigned leads[] = {0, 0xc0, 0xe0, 0xf0};
	int			more = (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);

	relay_text_add_char(to, (char) (leads[more] | code >> 6 * more));
	while (more-- > 0)
		relay_text_add_char(to, (char) (0x80 | (code >> 6 * more & 0x3f)));
}
