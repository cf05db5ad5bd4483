/*-------------------------------------------------------------------------
 *
 * json.c
 *		As much of JSON as a relay needs: texts to write, and the members of
 *		an object to read.
 *
 * What is read comes from the server, as jsonb prints it, so it is JSON.
 * Nothing here reads past the end of a text all the same.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "text.h"

static const char *skip_blanks(const char *at);
static const char *skip_value(const char *at);
static const char *read_string(const char *at, Text *to);
static const char *read_escape(const char *at, Text *to);
static unsigned read_hex(const char *at);
static void append_utf8(Text *to, unsigned code);

/*
 * Append a text in UTF-8 as a JSON string; nothing as null.
 */
void
json_string(Text *to, const char *text)
{
	if (!text)
	{
		text_add(to, "null");
		return;
	}
	text_add_char(to, '"');
	for (; *text; text ++)
	{
		if (*text == '"' || *text == '\\')
			text_add_char(to, '\\');
		if ((unsigned char) *text <' ')
			text_addf(to, "\\u%04x", (unsigned char) *text);
		else
			text_add_char(to, *text);
	}
	text_add_char(to, '"');
}

/*
 * Read the next member of an object: "at" is the object at first, and where to
 * go on after that.  A value that is a string is given without its quotes,
 * another one as it stands.  False: there is no other member, or it is no
 * object.
 */
bool
json_member(const char **at, Text *name, Text *value)
{
	const char *c = skip_blanks(*at);

	text_clear(name);
	text_clear(value);
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

		text_add_bytes(value, c, (size_t) (end - c));
		c = end;
	}
	*at = c;
	return true;
}

static const char *
skip_blanks(const char *at)
{
	return at + strspn(at, " \t\r\n");
}

/*
 * Behind a value that is no string.
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
 * Behind a string; append what it stands for, if somebody wants it.
 */
static const char *
read_string(const char *at, Text *to)
{
	for (at++; *at && *at != '"';)
	{
		if (*at == '\\' && at[1])
			at = read_escape(at + 1, to);
		else
		{
			if (to)
				text_add_char(to, *at);
			at++;
		}
	}
	return *at ? at + 1 : at;
}

static const char *
read_escape(const char *at, Text *to)
{
	static const char letters[] = "bfnrt";
	static const char meant[] = "\b\f\n\r\t";
	const char *letter = strchr(letters, *at);

	if (*at == 'u' && strspn(at + 1, "0123456789abcdefABCDEF") >= 4)
	{
		unsigned	code = read_hex(at + 1);

		at += 5;
		/* Two escapes for what lies beyond the first plane. */
		if (code >= 0xd800 && code < 0xdc00 && at[0] == '\\' && at[1] == 'u' &&
			strspn(at + 2, "0123456789abcdefABCDEF") >= 4)
		{
			code = 0x10000 + ((code - 0xd800) << 10) +
				((read_hex(at + 2) - 0xdc00) & 0x3ff);
			at += 6;
		}
		if (to)
			append_utf8(to, code);
		return at;
	}
	if (to)
		text_add_char(to, letter ? meant[letter - letters] : *at);
	return at + 1;
}

static unsigned
read_hex(const char *at)
{
	char		digits[5] = {0};

	memcpy(digits, at, 4);
	return (unsigned) strtoul(digits, NULL, 16);
}

static void
append_utf8(Text *to, unsigned code)
{
	if (code < 0x80)
		text_add_char(to, (char) code);
	else if (code < 0x800)
	{
		text_add_char(to, (char) (0xc0 | code >> 6));
		text_add_char(to, (char) (0x80 | (code & 0x3f)));
	}
	else if (code < 0x10000)
	{
		text_add_char(to, (char) (0xe0 | code >> 12));
		text_add_char(to, (char) (0x80 | (code >> 6 & 0x3f)));
		text_add_char(to, (char) (0x80 | (code & 0x3f)));
	}
	else
	{
		text_add_char(to, (char) (0xf0 | code >> 18));
		text_add_char(to, (char) (0x80 | (code >> 12 & 0x3f)));
		text_add_char(to, (char) (0x80 | (code >> 6 & 0x3f)));
		text_add_char(to, (char) (0x80 | (code & 0x3f)));
	}
}
