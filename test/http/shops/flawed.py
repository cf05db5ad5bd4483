#!/usr/bin/python3
"""The shop of plain.py with one mistake, named by the variable FLAW: a method
of its own in place of the right one.  Controls of the suite; see
test/http/control, which says what promises each of them breaks."""

import copy
import json
import os
import secrets
import threading
from contextlib import contextmanager

import plain
from naive import Naive
from plain import Plain
from skeleton import WAIT_MS, Bad, Refused, Reply, Request, json_reply, serve


class SendsBeforeCommit(Plain):
    def once(self, request, key, handler):
        if key is None:
            return super().once(request, key, handler)
        connection = plain.psycopg.connect(os.environ['DATABASE_URL'])
        try:
            self.claim(connection, request, key, None, 0)
            reply = handler(connection)
            self.complete(connection, request, key, None, reply)
        except BaseException:
            connection.close()
            raise
        threading.Timer(0.5, lambda: (connection.commit(), connection.close())).start()
        return reply


class ClaimsApart(Plain):
    """A transaction for the claim, one for the effect, one for the answer."""

    def once(self, request, key, handler):
        if key is None:
            return super().once(request, key, handler)
        with self.pool.connection() as connection:
            token, _, _ = self.claim(connection, request, key, 1, 0)
        with self.pool.connection() as connection:
            reply = handler(connection)
        with self.pool.connection() as connection:
            self.complete(connection, request, key, token, reply)
        return reply


class ComparesNothing(Plain):
    def claim(self, connection, request, *rest):
        return super().claim(connection, Request('POST', '/', request.headers, b''), *rest)


class ComparesParsed(Plain):
    def claim(self, connection, request, *rest):
        try:
            body = json.dumps(json.loads(request.body, parse_int=float)).encode()
        except ValueError:
            body = request.body
        return super().claim(connection, Request(request.method, request.target, request.headers, body), *rest)


class ComparesBytes(Plain):
    def claim(self, connection, request, *rest):
        headers = copy.copy(request.headers)
        del headers['Content-Type']
        return super().claim(connection, Request(request.method, request.target, headers, request.body), *rest)


class ComparesNoQuery(Plain):
    def claim(self, connection, request, *rest):
        return super().claim(connection, Request(request.method, request.path, request.headers, request.body), *rest)


class ReplaysCookies(Plain):
    def complete(self, *rest):
        plain.KEPT_HEADERS.update({'set-cookie', 'x-trace'})
        super().complete(*rest)


class OneLineAHeader(Plain):
    def complete(self, connection, request, key, token, reply):
        one = Reply(reply.status, reply.body, headers=dict(reply.headers).items())
        super().complete(connection, request, key, token, one)


class StoresText(Plain):
    def complete(self, connection, request, key, token, reply):
        body = reply.body.decode('utf-8', 'replace').encode()
        super().complete(connection, request, key, token, Reply(reply.status, body, headers=reply.headers))


class StoresErrors(Plain):
    def once(self, request, key, handler):
        def caught(connection):
            try:
                with connection.transaction():
                    return handler(connection)
            except (Refused, plain.psycopg.Error):
                raise
            except Exception:
                return json_reply(500, {'error': 'internal'})
        return super().once(request, key, caught)


class StoresNoRefusal(Plain):
    def complete(self, connection, request, key, token, reply):
        if reply.status < 400:
            super().complete(connection, request, key, token, reply)
        else:
            connection.rollback()


class StoresRaised(Plain):
    def once(self, request, key, handler):
        def caught(connection):
            try:
                return handler(connection)
            except Refused as refused:
                return refused.reply
        return super().once(request, key, caught)


class NobodyIsSomebody(Plain):
    def claim(self, connection, request, *rest):
        same = Request(request.method, request.target, request.headers, request.body)
        same.user = request.user or 'nobody'
        return super().claim(connection, same, *rest)

    def complete(self, connection, request, *rest):
        same = Request(request.method, request.target, request.headers, request.body)
        same.user = request.user or 'nobody'
        super().complete(connection, same, *rest)


class OneScope(Plain):
    def claim(self, connection, request, *rest):
        headers = request.headers
        same = Request(request.method, request.target, headers, request.body)
        same.user = 'everybody'
        return super().claim(connection, same, *rest)

    def complete(self, connection, request, *rest):
        same = Request(request.method, request.target, request.headers, request.body)
        same.user = 'everybody'
        super().complete(connection, same, *rest)


class TriesOnce(Plain):
    def once(self, request, key, handler):
        with self.may_wait(False) as wait, self.pool.connection() as connection:
            if key is None:
                return handler(connection)
            self.claim(connection, request, key, None, wait)
            reply = handler(connection)
            self.complete(connection, request, key, None, reply)
        return reply


class RetriesBlindly(TriesOnce):
    """Once more without the claim when the connection is lost."""

    def once(self, request, key, handler):
        try:
            return super().once(request, key, handler)
        except plain.psycopg.OperationalError:
            with self.pool.connection() as connection:
                return handler(connection)


class AllMayWait(Plain):
    @contextmanager
    def may_wait(self, lost):
        yield WAIT_MS / 1000


class WaitsForEver(Plain):
    @contextmanager
    def may_wait(self, lost):
        yield 3600


class NoneMayWait(Plain):
    @contextmanager
    def may_wait(self, lost):
        yield 0


class NoRetryAfter(Plain):
    def claim(self, *rest):
        try:
            return super().claim(*rest)
        except Refused as refused:
            refused.reply.headers = [header for header in refused.reply.headers if header[0] != 'Retry-After']
            raise


class RetryAfterLease(Plain):
    def claim(self, *rest):
        try:
            return super().claim(*rest)
        except Refused as refused:
            refused.reply.headers = [(name, '30' if name == 'Retry-After' else text) for name, text in refused.reply.headers]
            raise


class TakesAnyKey(Plain):
    def claim(self, connection, request, key, *rest):
        return super().claim(connection, request, (key + '-' * 16)[:128].replace(' ', '-'), *rest)

    def complete(self, connection, request, key, *rest):
        super().complete(connection, request, (key + '-' * 16)[:128].replace(' ', '-'), *rest)


class RequiresNoKey(Plain):
    def payments(self, request):
        if not request.headers.get('Idempotency-Key'):
            with self.pool.connection() as connection:
                return self.pay(request, None, connection)
        return super().payments(request)


class NoKeyIsAKey(Plain):
    def blobs(self, request):
        key = plain.key_of(request, False) or 'the-one-of-all-without'
        return self.once(request, key, lambda connection: self.reverse(request, connection))


class OtherRefusals(Plain):
    """Some refusals of a claim are answered as others."""

    def claim(self, *rest):
        try:
            return super().claim(*rest)
        except Refused as refused:
            for kind, reply in self.others.items():
                if kind in refused.reply.body:
                    refused.reply = reply(refused.reply.status)
            raise


class HidesErased(OtherRefusals):
    others = {b':response-erased': lambda status: Reply(status, b'', None, [('Idempotent-Replayed', 'true')])}


class ExpiredIsRunning(OtherRefusals):
    others = {b':key-expired': lambda status: plain.problem('in-progress', headers=[('Retry-After', '1')])}


class TakesFirstLine(Plain):
    def payments(self, request):
        first = request.headers.get('Idempotency-Key')
        del request.headers['Idempotency-Key']
        if first is not None:
            request.headers['Idempotency-Key'] = first
        return super().payments(request)


class KeepsQuotes(Plain):
    def payments(self, request):
        lines = request.headers.get_all('Idempotency-Key', [])
        del request.headers['Idempotency-Key']
        for line in lines:
            request.headers['Idempotency-Key'] = line.strip().replace('\\', '').replace('"', '-')
        return super().payments(request)


class TakesParameters(Plain):
    def payments(self, request):
        lines = request.headers.get_all('Idempotency-Key', [])
        del request.headers['Idempotency-Key']
        for line in lines:
            request.headers['Idempotency-Key'] = line.replace('";', '-').replace('=', '-') + ('"' if '";' in line else '')
        return super().payments(request)


class CutsLargeResponses(Plain):
    def complete(self, connection, request, key, token, reply):
        super().complete(connection, request, key, token,
                         Reply(reply.status, reply.body[:self.most], headers=reply.headers))


class HalfStoresStreams(Plain):
    def streams(self, request):
        return self.once(request, plain.key_of(request), lambda connection: self.reverse(request, connection))


class NoHeartbeats(Plain):
    def heartbeats(self, *rest):
        pass


class FailsNothing(Plain):
    def insist(self, statement, *values):
        if 'idem_fail' not in statement:
            return super().insist(statement, *values)


class NewBankKeys(Plain):
    def bank(self, key, ms):
        super().bank(secrets.token_hex(16), ms)


class OneBankKey(Plain):
    def bank(self, key, ms):
        super().bank('the only key there is', ms)


class CallsBankTwice(Plain):
    def bank(self, key, ms):
        super().bank(key, ms)
        super().bank(key, 0)


class ForgetsSteps(Plain):
    def claim(self, *rest):
        token, attempt, _ = super().claim(*rest)
        return token, attempt, {}


class AnswersWhenLost(Plain):
    def insist(self, statement, *values):
        try:
            return super().insist(statement, *values)
        except plain.psycopg.Error as error:
            if error.sqlstate not in ('ID003', 'ID004'):
                raise


class LastLikeWins(Plain):
    def like(self, request):
        active, action_id = request.json(active=bool, action_id=int)
        with self.pool.connection() as connection:
            connection.execute("""SELECT idem_set(%s::text, 'item', %s::text, 'like', %s::boolean,
                (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)""",
                               (request.user, request.path.split('/')[2], active))
        return json_reply(200, {'is_active': active, 'last_action_id': action_id, 'processed': True})


class SharedLikes(Plain):
    def like(self, request):
        request.user = 'everybody'
        return super().like(request)


class AnyForm(Plain):
    def token(self, request, connection):
        try:
            return super().token(request, connection)
        except Bad:
            return secrets.token_hex(8)


class FormEachTime(Plain):
    def submit(self, request):
        with self.pool.connection() as connection:
            token = self.token(request, connection)
            connection.execute('INSERT INTO submissions VALUES (%s, %s)',
                               (token + secrets.token_hex(4), request.user))
        return Reply(303, headers=[('Location', '/thanks')])


class TakesHalfBodies(Plain):
    takes_half = True


class KeepsAfterSending(Naive):
    """What was sent is kept, when it was."""

    def sent(self, request, reply):
        name = request.user, request.headers.get('Idempotency-Key', '').strip('"')
        if name in self.unsent:
            self.answers[name] = self.unsent.pop(name)

    def once(self, request, key, handler):
        self.unsent = getattr(self, 'unsent', {})
        reply = super().once(request, key, handler)
        name = request.user, key
        if name in self.answers and not any(header[0] == 'Idempotent-Replayed' for header in reply.headers):
            self.unsent[name] = self.answers.pop(name)
        return reply


class LosesConnections(Plain):
    """Of a transaction that fails, the connection does not come back."""

    def __init__(self):
        super().__init__()
        good = self.pool.connection

        @contextmanager
        def connection():
            with good() as found:
                try:
                    yield found
                except (Refused, Bad):
                    raise
                except BaseException:
                    self.pool.free.get()
                    raise
        self.pool.connection = connection


class OffersPaymentsOnly(Plain):
    """No mistake: a server that has no other routes than the suite needs."""

    def route(self, request):
        return super().route(request) if request.path in ('/payments', '/effects', '/ping', '/thanks') else Reply(404)


if __name__ == '__main__':
    serve(globals()[os.environ['FLAW']]())
