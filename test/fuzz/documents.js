#!/usr/bin/env node
//
// test/fuzz/documents.js generate SEED COUNT | read DIRECTORY | write DIRECTORY SEED COUNT
//
// Requests, and what the extension must make of them, by an implementation
// that shares nothing with it: a parser of its own, ECMAScript's numbers,
// strings and sorting, Node's SHA-256.  Random documents in random spellings,
// or the files of a directory.
//
// Prints lines for COPY: method, path, document, canonical form, hash of the
// request with this form, hash of the request with the document's bytes.  The
// canonical form is \N for what is no JSON.  Or write random documents to files.

'use strict';

const crypto = require('crypto');
const fs = require('fs');
const path = require('path');

//
// Canonical form
//

// Numbers keep their text in here.
class JsonNumber {
	constructor(text) {
		this.text = text;
	}
}

// Parse strictly.  An object becomes a Map, so that no name is special.
function parse(text) {
	// eslint-disable-next-line no-control-regex -- a string of JSON has none of them
	const token = /[ \t\n\r]*(?:([{}[\],:])|("(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9.eE+-])|(true|false|null)(?![a-zA-Z0-9_]))/y;
	let match = null;

	function next() {
		match = token.exec(text);
		if (match === null)
			throw new SyntaxError('no JSON');
		return match;
	}
	function value() {
		if (match[2] !== undefined)
			return JSON.parse(match[2]);
		if (match[3] !== undefined)
			return new JsonNumber(match[3]);
		if (match[4] !== undefined)
			return { true: true, false: false, null: null }[match[4]];
		if (match[1] === '[') {
			const items = [];
			if (next()[1] === ']')
				return items;
			for (;;) {
				items.push(value());
				if (next()[1] === ']')
					return items;
				expect(',');
				next();
			}
		}
		expect('{');
		const members = new Map();
		if (next()[1] === '}')
			return members;
		for (;;) {
			if (match[2] === undefined)
				throw new SyntaxError('no name');
			const name = JSON.parse(match[2]);
			next();
			expect(':');
			next();
			members.set(name, value());
			if (next()[1] === '}')
				return members;
			expect(',');
			next();
		}
	}
	function expect(character) {
		if (match[1] !== character)
			throw new SyntaxError('no ' + character);
	}

	next();
	const document = value();
	if (!/^[ \t\n\r]*$/.test(text.slice(token.lastIndex)))
		throw new SyntaxError('more than one document');
	return document;
}

function canonical(value) {
	if (value instanceof JsonNumber)
		return canonicalNumber(value.text);
	if (Array.isArray(value))
		return '[' + value.map(canonical).join(',') + ']';
	if (value instanceof Map)
		// sort() compares UTF-16 code units, as RFC 8785 does
		return '{' + [...value.keys()].sort().map(
			(name) => JSON.stringify(name) + ':' + canonical(value.get(name))).join(',') + '}';
	return JSON.stringify(value);
}

// As ECMAScript writes the nearest double.  The one exception of the extension:
// a number that no writer of doubles sends keeps all its digits, that is, one
// with more than 17, an integer that a double rounds, one out of range.
function canonicalNumber(text) {
	const [, sign, whole, fraction = '', exponent = '0'] =
		/^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(text);
	const all = whole + fraction;
	const leading = /^0*/.exec(all)[0].length;
	const digits = all.slice(leading).replace(/0+$/, '');
	const point = whole.length - leading + Number(exponent);
	const double = Number(text);

	if (digits === '')
		return '0';
	if (digits.length <= 17 && Number.isFinite(double) && double !== 0 &&
		(digits.length > point ||
			BigInt(digits + '0'.repeat(point - digits.length)) === BigInt(Math.abs(double))))
		return String(double);

	if (point > 21 || point <= -6)
		return sign + digits[0] + (digits.length > 1 ? '.' + digits.slice(1) : '') +
			'e' + (point > 0 ? '+' : '') + (point - 1);
	if (point <= 0)
		return sign + '0.' + '0'.repeat(-point) + digits;
	if (point >= digits.length)
		return sign + digits + '0'.repeat(point - digits.length);
	return sign + digits.slice(0, point) + '.' + digits.slice(point);
}

//
// Random documents
//

let state = 0;

// mulberry32, in [0, 1)
function random() {
	state = (state + 0x6d2b79f5) | 0;
	let t = Math.imul(state ^ (state >>> 15), 1 | state);
	t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
	return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
}
const below = (n) => Math.floor(random() * n);
const pick = (list) => list[below(list.length)];
const times = (n, make) => Array.from({ length: n }, make);
const space = () => (below(4) ? '' : times(below(3), () => pick([' ', '\t', '\n', '\r'])).join(''));

function randomDouble() {
	const bytes = Buffer.alloc(8);

	for (;;) {
		bytes.writeUInt32BE(below(2 ** 32), 0);
		bytes.writeUInt32BE(below(2 ** 32), 4);
		if (Number.isFinite(bytes.readDoubleBE(0)))
			return bytes.readDoubleBE(0);
	}
}

function randomNumber() {
	const digits = (n) => times(n, () => below(10)).join('');
	const big = (bits) => BigInt(below(2 ** 32)) << BigInt(below(bits));
	let text = pick([
		() => String(randomDouble()),
		() => randomDouble().toPrecision(1 + below(17)),
		() => String(below(2 ** 53)) + pick(['', '0', '.5', '000', '.25', '.10']),
		() => String((1n << BigInt(48 + below(30))) + BigInt(below(9) - 4)),
		() => String(big(40) + big(20)),
		() => (random() * 10 ** (below(44) - 22)).toPrecision(1 + below(17)),
		() => below(1e4) + pick(['e', 'E', 'e+', 'e-', 'E-']) + below(pick([5, 30, 350, 5000])),
		() => String(below(10)) + '.' + digits(1 + below(pick([4, 20, 60]))),
		() => (1 + below(9)) + digits(below(pick([16, 20, 40]))),
		() => '0.' + '0'.repeat(below(12)) + digits(1 + below(18)),
		() => pick(['0', '-0', '0.0', '0e5', '1e20', '1e21', '1e-6', '1e-7', '5e-324', '2e-324',
			'1.7976931348623157e308', '1.7976931348623159e308', '9007199254740993', '1e131071', '1e-16383']),
	])();

	if (below(5) === 0 && text[0] !== '-')
		text = '-' + text;
	return text;
}

function randomCharacter() {
	return String.fromCodePoint(pick([
		() => 0x61 + below(26),
		() => 0x20 + below(0x5f),
		() => 1 + below(0x1f),
		() => 0x7f + below(0x100),
		() => 0x2020 + below(0x20),
		() => 0xd700 + below(0x100),
		() => 0xe000 + below(0x2000),
		() => 0x10000 + below(0x100000),
	])());
}

const randomText = (most) => times(below(most), randomCharacter).join('');

// One of the many ways to write a string
function writeString(string) {
	const short = { '"': '\\"', '\\': '\\\\', '/': '\\/', '\b': '\\b', '\f': '\\f', '\n': '\\n', '\r': '\\r', '\t': '\\t' };
	let text = '';

	for (const character of string) {
		const must = character < ' ' || character === '"' || character === '\\';

		if (short[character] !== undefined && (must ? below(2) : below(4) === 0))
			text += short[character];
		else if (must || below(8) === 0)
			for (let i = 0; i < character.length; i++) {
				const hex = character.charCodeAt(i).toString(16).padStart(4, '0');
				text += '\\u' + (below(2) ? hex : hex.toUpperCase());
			}
		else
			text += character;
	}
	return '"' + text + '"';
}

function randomDocument(depth) {
	const kind = below(depth > 0 ? 10 : 6);

	if (kind < 3)
		return randomNumber();
	if (kind < 5)
		return writeString(randomText(pick([2, 6, 40])));
	if (kind < 6)
		return pick(['true', 'false', 'null', '[]', '{}', '""']);
	const inner = () => space() + randomDocument(depth - 1) + space();
	if (kind < 8)
		return '[' + (times(below(6), inner).join(',') || space()) + ']';

	const names = times(below(8), () => randomText(4));
	if (names.length > 1 && below(4) === 0)
		names.push(pick(names));
	return '{' + (names.map((name) => space() + writeString(name) + space() + ':' + inner()).join(',') || space()) + '}';
}

const METHOD_CHARACTERS = '!#$%&\'*+-.^_`|~09azAZ';
const randomMethod = () => pick(['GET', 'post', 'Put', 'DELETE',
	times(1 + below(8), () => pick([...METHOD_CHARACTERS])).join('')]);
const randomPath = () => '/' + times(below(5), () => pick([randomText(6), ':', '%3A', 'orders'])).join('/');

//
// Output
//

// What COPY takes.
const isText = (string) => !string.includes('\0') && !/[\ud800-\udfff]/u.test(string);

function print(method, requestPath, document) {
	const sha256 = (body) => crypto.createHash('sha256').update(
		method.toUpperCase() + ':' + requestPath.replaceAll(':', '%3A') + ':' + body).digest('hex');
	const escape = (string) => string.replace(/[\\\t\n\r]/g,
		(c) => ({ '\\': '\\\\', '\t': '\\t', '\n': '\\n', '\r': '\\r' })[c]);
	let form = null;

	try {
		form = canonical(parse(document));
	} catch (error) {
		if (!(error instanceof SyntaxError))
			throw error;
	}
	fs.writeSync(1, [method, requestPath, document].map(escape).join('\t') + '\t' +
		(form === null ? '\\N\t\\N' : escape(form) + '\t' + sha256(form)) + '\t' + sha256(document) + '\n');
}

const [command, ...args] = process.argv.slice(2);

if (command === 'generate') {
	state = Number(args[0]);
	for (let i = 0; i < Number(args[1]); i++)
		print(randomMethod(), randomPath(), space() + randomDocument(below(6)) + space());
} else if (command === 'write') {
	state = Number(args[1]);
	for (let i = 0; i < Number(args[2]); i++)
		fs.writeFileSync(path.join(args[0], String(i)), randomDocument(below(4)));
} else if (command === 'read') {
	for (const name of fs.readdirSync(args[0]).sort()) {
		const bytes = fs.readFileSync(path.join(args[0], name));
		const text = bytes.toString('utf8');

		if (Buffer.from(text, 'utf8').equals(bytes) && isText(text))
			print('POST', '/', text);
	}
} else {
	console.error('usage: documents.js generate SEED COUNT | read DIRECTORY | write DIRECTORY SEED COUNT');
	process.exit(2);
}
