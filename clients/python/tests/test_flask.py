"""Guards in Flask, where test/http does not look."""

import functools
import gc
import io
import sys
import time
import weakref
from contextlib import nullcontext

import psycopg
import pytest
from flask import Blueprint, Flask, Response, abort, after_this_request, g, redirect, request, session
from flask.views import MethodView
from werkzeug.exceptions import HTTPException

from pg_idempotency import AsyncIdempotency, Idempotency, TransactionEnded, new_key
from pg_idempotency.flask import Guard, install


def shop(idem, order, rule="/o", methods=("POST",), **options):
    """One guarded view."""
    app = Flask(__name__)
    app.secret_key = "secret"
    app.add_url_rule(rule, "order", Guard(**{"scope": lambda request: "u", **options})(order), methods=list(methods))
    install(app, idem)
    return app


def buy(app, key, path="/o", **options):
    headers = {"Idempotency-Key": key} if key else {}
    return app.test_client().post(path, **{"data": b"{}", "headers": headers, **options})


def insert(name):
    g.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (name,))


def replayed(answer):
    return answer.headers.get("Idempotent-Replayed") == "true"


def again():
    g.idempotency.tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")


@pytest.mark.parametrize("headers", [{"Range": "bytes=2-4"}, {"If-None-Match": '"tag"'}], ids=["range", "fresh"])
def test_a_file_is_stored_whole(idem, tmp_path, headers):
    """Also if the first request asks for a range of it, or has a copy."""
    from flask import send_file

    (tmp_path / "file").write_bytes(b"0123456789")
    app, key = Flask(__name__), new_key()

    @app.before_request
    def before():
        assert request.range or '"tag"' in str(request.if_none_match)

    @app.get("/o")
    @Guard(scope=lambda request: "u")
    def order():
        assert not request.range and not request.if_none_match
        return send_file(tmp_path / "file", conditional=True, etag="tag")

    install(app, idem)
    answers = [app.test_client().get("/o", headers={"Idempotency-Key": key, **headers}) for _ in range(2)]
    assert [(one.status_code, one.data, replayed(one)) for one in answers] == [(200, b"0123456789", False), (200, b"0123456789", True)]


def test_a_view_sees_the_condition_of_a_write(idem):
    app = shop(idem, lambda: request.headers["If-None-Match"], methods=["PUT"])
    assert app.test_client().put("/o", headers={"Idempotency-Key": new_key(), "If-None-Match": "*"}).text == "*"


# Which requests are guarded


@pytest.mark.parametrize("path", ["/o", "//o", "/o/", "/o%0A", "/%6f", "/sub/o", "//sub//o", "/sub/o/"])
@pytest.mark.parametrize("mounted", [False, True])
def test_no_request_passes_the_guard_by_its_spelling(idem, effects, path, mounted):
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    key = new_key()

    def order():
        insert(key)
        return "ok"

    app = Flask(__name__)
    guarded = Guard(scope=lambda request: "u")(order)
    app.add_url_rule("/o", "order", guarded, methods=["POST"], strict_slashes=False)
    sub = Blueprint("sub", __name__, url_prefix="/sub")
    sub.add_url_rule("/o", "order", guarded, methods=["POST"], strict_slashes=False)
    app.register_blueprint(sub)
    install(app, idem)
    if mounted:
        app.wsgi_app = DispatcherMiddleware(Flask("other").wsgi_app, {"/mount": app.wsgi_app})
    found = [buy(app, key, path=("/mount" if mounted else "") + path) for _ in range(3)]
    ran = found[0].status_code == 200
    assert [answer.status_code for answer in found] == [200 if ran else found[0].status_code] * 3
    assert [replayed(answer) for answer in found] == [False, ran, ran] and effects(key) == ran
    assert ran or found[0].status_code in (308, 404)


def test_methods_of_a_class_are_views(idem, effects):
    key, app = new_key(), Flask(__name__)

    class Orders(MethodView):
        @Guard(scope=lambda request, user: user)
        def post(self, user):
            insert(key)
            return user

    app.add_url_rule("/o/<user>", view_func=Orders.as_view("orders"))
    install(app, idem)
    assert [replayed(buy(app, key, path="/o/ann")) for _ in range(2)] == [False, True] and effects(key) == 1
    assert idem.lookup("ann", key).state == "completed"


def test_a_guard_that_cannot_run_is_an_error(idem):
    app = Flask(__name__)
    app.testing = True

    @app.post("/o")
    @Guard(scope=lambda request: "u")
    def order():
        raise AssertionError

    with pytest.raises(RuntimeError, match="no install"):
        buy(app, new_key())
    app = Flask(__name__)

    @Guard(scope=lambda request: "u")
    @app.post("/above")
    def above():
        raise AssertionError

    install(app, idem)
    for path in ("/above", "/other"):
        with pytest.raises(RuntimeError, match="above has a guard, but its route bypasses the guard"):
            buy(app, new_key(), path=path)
    with pytest.raises(TypeError, match="above a function"):
        Guard(scope=lambda request: "u")(MethodView)
    with pytest.raises(TypeError, match="needs an Idempotency"):
        install(app, AsyncIdempotency(""))
    with pytest.warns(UserWarning, match="decorators below the guard"):
        Guard(scope=lambda request: "u")(login_required(lambda: ""))


def test_two_guards_in_a_request_do_not_share_a_response(idem, effects):
    """They need not if each has a scope of its own, or if the first one was rolled back."""
    app, name, scopes, fails = Flask(__name__), new_key(), {"reserve": "u", "pay": "u"}, [1]

    def guarded(place):
        @Guard(scope=lambda request: scopes[place])
        def view():
            insert(name + request.path + place)
            if fails:
                raise LookupError(fails.pop())
            return place, 201
        return view

    reserve, pay = guarded("reserve"), guarded("pay")

    @app.post("/both")
    def both():
        try:
            reserve()
        except LookupError:
            reserve()
        return pay()

    @app.post("/twice")
    def twice():
        reserve()
        return reserve()

    install(app, idem)
    app.testing = True
    for path in "/both", "/twice":
        key = new_key()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"POST {path} calls two functions with a guard"):
                buy(app, key, path=path)
            assert effects(name + path + "reserve") == 1
    scopes["pay"], key = "u, pay", new_key()
    answers = [buy(app, key, path="/both") for _ in range(2)]
    assert [(answer.text, replayed(answer)) for answer in answers] == [("pay", False), ("pay", True)]
    assert [effects(name + "/both" + place) for place in scopes] == [2, 1]


# The sender


def login_required(view):
    @functools.wraps(view)
    def called(*arguments, **named):
        return view(*arguments, **named) if "user" in session else redirect("/login")
    return called


def test_a_replay_is_for_those_who_have_logged_in(idem):
    """A decorator above the guard, and before_request, refuse it as they refuse the request; their answers are not stored."""
    app, key, banned = Flask(__name__), new_key(), []
    app.secret_key = "secret"

    @app.before_request
    def before():
        if "X-Tenant" not in request.headers:
            return "which tenant?", 401
        return abort(403) if banned else None

    @app.post("/login")
    def login():
        session["user"] = "ann"
        return ""

    @app.post("/o")
    @login_required
    @Guard(scope=lambda request: session["user"])
    def order():
        return g.idempotency.scope, 201

    install(app, idem)
    client, headers = app.test_client(), {"Idempotency-Key": key, "X-Tenant": "t"}

    def found(**headers):
        answer = client.post("/o", data=b"{}", headers=headers)
        return answer.status_code, replayed(answer)

    assert found(**{"Idempotency-Key": key}) == (401, False)
    assert found(**headers) == (302, False)
    with psycopg.connect("") as connection:
        assert connection.execute("SELECT count(*) FROM idem_keys WHERE key = %s", (key,)).fetchone() == (0,)
    client.post("/login", headers=headers)
    assert [found(**headers) for _ in range(2)] == [(201, False), (201, True)]
    assert found(**{"Idempotency-Key": key}) == (401, False)
    banned.append(1)
    assert found(**headers) == (403, False)
    banned.clear()
    client = app.test_client()
    assert found(**headers) == (302, False)


def test_a_scope_that_refuses_is_answered_by_the_application(idem):
    """In the request's own context, whose teardown runs once."""
    torn = []
    app = shop(idem, lambda: g.idempotency.scope, scope=lambda request: session.get("user") or abort(401))
    app.teardown_request(torn.append)
    app.add_url_rule("/login", "login", lambda: session.update(user="ann") or "", methods=["POST"])
    client = app.test_client()
    assert client.post("/o", headers={"Idempotency-Key": new_key()}).status_code == 401
    client.post("/login")
    torn.clear()
    answer = client.post("/o", headers={"Idempotency-Key": new_key()})
    assert (answer.status_code, answer.text, torn) == (200, "ann", [None])


# The order of things


@pytest.mark.parametrize("ends", ["committed", "5xx", "raised", "retried"])
@pytest.mark.parametrize("job", [False, True])
def test_callbacks_are_behind_the_transaction(idem, effects, ends, job):
    """call_on_close, teardown of the request and of the application: after COMMIT, or after the rollback; once."""
    key, seen, tries = new_key(), [], []

    def note(name, error=None):
        # Another session sees what was committed, and no lock is held on the key.
        with psycopg.connect("") as other:
            state = Idempotency("").on(other).claim("u", key).outcome
            other.rollback()
        seen.append((name, effects(key), state, type(error)))

    def order():
        tries.append(1)
        if not job:
            insert(key)

        @after_this_request
        def closes(response):
            response.call_on_close(lambda: note("closed"))
            return response

        if ends == "raised":
            raise ZeroDivisionError
        if ends == "retried" and len(tries) < 2 and not job:
            again()
        return "ok", 503 if ends == "5xx" else 201

    app = shop(idem, order, job=job)
    app.teardown_request(lambda error: note("request", error))
    app.teardown_appcontext(lambda error: note("context", error))
    response = buy(app, key)
    response.close()
    done = ends in ("committed", "retried")
    assert response.status_code == {"5xx": 503, "raised": 500}.get(ends, 201)
    error = ZeroDivisionError if ends == "raised" else type(None)
    was = (int(done and not job), "replay" if done else "new")
    assert seen == [("request", *was, error), ("context", *was, error), ("closed", *was, type(None))]
    assert tries == [1] * (2 if ends == "retried" and not job else 1)
    if done:
        seen.clear()
        assert replayed(buy(app, key)) and [name for name, *_ in seen] == ["request", "context"]


def test_after_request_adds_to_a_replay_what_it_adds_to_the_first_answer(idem):
    """What is stored is the view's own response."""
    import gzip

    runs = []

    def order():
        runs.append(1)
        return "ok", 201, {"Location": "/o/1", "Cache-Control": "private, no-store"}

    app = shop(idem, order)

    @app.after_request
    def after(response):
        response.headers["Access-Control-Allow-Origin"] = "*"
        session["seen"] = 1
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.set_data(gzip.compress(response.get_data()))
            response.headers["Content-Encoding"] = "gzip"
        return response

    key = new_key()

    def found(key, encoding="", data=b"{}"):
        answer = buy(app, key, data=data, headers={"Accept-Encoding": encoding, **({"Idempotency-Key": key} if key else {})})
        assert answer.headers["Access-Control-Allow-Origin"] == "*" and answer.content_length == len(answer.data)
        return answer

    for encoding in ("gzip", "", "gzip"):
        answer = found(key, encoding)
        assert (answer.status_code, gzip.decompress(answer.data) if encoding else answer.data) == (201, b"ok")
        assert answer.headers["Location"] == "/o/1" and answer.headers["Cache-Control"] == "private, no-store"
    assert replayed(answer) and len(runs) == 1
    assert (found(None).status_code, found(None).mimetype) == (400, "application/problem+json")
    assert found(key, data=b"[]").status_code == 422


def test_flask_answers_what_the_transaction_raises(pool):
    """With the error handlers of the application.  Without a connection, the guard answers 503 by itself."""
    from psycopg_pool import PoolTimeout

    class Dry:
        def connection(self):
            raise PoolTimeout("no connection")

    for source, handled, status in ((pool, TransactionEnded, 409), (pool, Exception, 418), (Dry(), PoolTimeout, 503),
                                    (pool, None, 500)):
        runs = []

        def order():
            runs.append(1)
            g.idempotency.tx.execute("ROLLBACK")
            return "ok"

        app = shop(Idempotency(source), order)
        if handled is not None:
            app.register_error_handler(handled, lambda error: (f"refused: {type(error).__name__}", status))
        answer = buy(app, new_key())
        assert answer.status_code == status and not replayed(answer)
        if handled is PoolTimeout:
            assert answer.json["type"] == "urn:pg-idempotency:unavailable"
        else:
            assert handled is None or answer.text == "refused: TransactionEnded"
        assert runs == ([] if handled is PoolTimeout else [1])


def test_another_try_gets_what_the_first_one_got(idem, effects):
    """Before the application answers the error; and not what the first try has made of the request."""
    key, seen = new_key(), []

    def order():
        if request.is_json:
            seen.append(dict(request.get_json()))
            request.get_json()["seen"] = True
        elif request.mimetype == "text/plain":
            seen.append(request.stream.read())
        else:
            seen.append((request.form["a"], request.files["f"].read(), request.files["f"].filename))
            if request.form["a"] == "closes":
                request.files["f"].close()
        insert(key)
        if len(seen) < 3:
            again()
        return "ok"

    app, errors = shop(idem, order), []
    app.register_error_handler(Exception, lambda error: (errors.append(str(error)) or "sorry", 500))
    assert buy(app, key, data=b'{"a": 1}', content_type="application/json").text == "ok" and seen == [{"a": 1}] * 3 and effects(key) == 1
    seen.clear()
    assert buy(app, new_key(), data={"a": "1", "f": (io.BytesIO(b"file"), "n")}).text == "ok"
    assert seen == [("1", b"file", "n")] * 3
    seen.clear()
    assert buy(app, new_key(), data=b"text", content_type="text/plain").text == "ok" and seen == [b"text"] * 3
    seen.clear()
    assert buy(app, new_key(), data={"a": "closes", "f": (io.BytesIO(b"file"), "n")}).status_code == 500
    assert len(seen) == 1 and "closed an uploaded file" in errors[-1]


@pytest.mark.parametrize("handled", [None, 409, Exception])
@pytest.mark.parametrize("job", [False, True])
def test_what_is_raised_is_rolled_back(idem, effects, handled, job):
    """abort(), too, and whatever the application makes of it; the key is free."""
    key, tries = new_key(), []

    def order():
        tries.append(1)
        if not job:
            insert(key)
        if len(tries) < 3:
            abort(409)
        return "yes"

    app = shop(idem, order, job=job)
    if handled is not None:
        app.register_error_handler(handled, lambda error: ("no", 409))
    for _ in range(2):
        answer = buy(app, key)
        assert answer.status_code == 409 and not replayed(answer)
        assert effects(key) == 0 and idem.lookup("u", key).state == ("failed" if job else None)
    assert buy(app, key).text == "yes" and effects(key) == (0 if job else 1)


@pytest.mark.parametrize("hides", ["abort", "handler", "after_request", "500"])
def test_a_success_for_what_was_rolled_back_is_500(idem, effects, hides, caplog):
    key, closed = new_key(), []

    def order():
        insert(key)
        if hides == "abort":
            abort(Response("fine", 201))
        raise LookupError

    app = shop(idem, order)

    @app.after_request
    def after(response):
        response.call_on_close(lambda: closed.append(1))
        response.status_code = 200 if hides == "after_request" else response.status_code
        return response

    if hides in ("handler", "500"):
        app.register_error_handler(LookupError if hides == "handler" else 500, lambda error: ("fine", 202))
    for number in range(2):
        answer = buy(app, key)
        assert answer.status_code == 500 and "rolled-back" in answer.text and "fine" not in answer.text
        answer.close()
        assert len(closed) == number + 1
    assert effects(key) == 0 and "POST /o was rolled back, and the application answered 20" in caplog.text


def test_pieces_are_stored_where_their_length_is_known(idem, effects):
    def order():
        insert(g.idempotency.key)
        return Response(iter([b"a", b"b"]), headers={"Content-Length": "2"} if known else None)

    app = shop(idem, order)
    for known in (True, False):
        key = new_key()
        found = [buy(app, key) for _ in range(2)]
        assert [answer.status_code for answer in found] == [200 if known else 500] * 2
        assert effects(key) == known == replayed(found[1])
        assert found[1].data == b"ab" if known else "streaming-refused" in found[1].text


def test_an_answer_without_a_type_is_replayed_without_one(idem):
    def order():
        response = Response(status=204)
        del response.headers["Content-Type"]
        return response

    app, key = shop(idem, order), new_key()
    for _ in range(2):
        answer = buy(app, key)
        assert answer.status_code == 204 and "Content-Type" not in answer.headers and not answer.data


# Bodies


def ask(app, body, key, length=None, terminated=False, **environ):
    """As a server hands it over; the status, and how many bytes were read."""
    said, source = [], io.BytesIO(body)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/o", "SERVER_NAME": "h", "SERVER_PORT": "80", "wsgi.input": source,
               "wsgi.url_scheme": "http", "wsgi.errors": sys.stderr, "CONTENT_TYPE": "text/plain",
               "wsgi.input_terminated": terminated, "HTTP_IDEMPOTENCY_KEY": key, **environ}
    if length is not None:
        environ["CONTENT_LENGTH"] = str(length)
    b"".join(app(environ, lambda status, headers, *more: said.append(int(status[:3]))))
    return said[0], source.tell()


def test_a_body_is_read_behind_the_key_and_the_scope_and_up_to_a_limit(idem):
    app = shop(idem, lambda: str(len(request.get_data())), max_request_size=200_000,
               scope=lambda request: request.headers.get("X-User") or abort(401))
    user = {"HTTP_X_USER": "u"}
    body = b"x" * 400_000
    assert ask(app, body, new_key(), len(body)) == (401, 0)
    assert ask(app, body, "", len(body), **user) == (400, 0)
    assert ask(app, body, new_key(), len(body), **user) == (413, 0)
    status, read = ask(app, body, new_key(), terminated=True, **user)
    assert status == 413 and read < 300_000
    app.config["MAX_CONTENT_LENGTH"] = 1000
    assert ask(app, body[:2000], new_key(), 2000, **user) == (413, 0)
    assert ask(app, body[:1000], new_key(), 1000, **user) == (200, 1000)
    assert ask(app, body[:1000], new_key(), 2000, **user)[0] in (400, 413)
    app.config["MAX_CONTENT_LENGTH"] = None
    assert ask(app, body[:1000], new_key(), 2000, **user)[0] == 400         # hung up


def test_a_form_that_was_read_before_the_guard_is_compared(idem):
    app = shop(idem, lambda: request.form["a"])

    @app.before_request
    def before():
        assert request.form["a"]

    def multipart(a):
        parts = [b'name="a"\r\n\r\n' + a, b'name="f"; filename="n"\r\n\r\n' + b"x" * 100_000]
        return b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--b--\r\nend"

    for data, content_type in ((lambda a: b"a=" + a, "application/x-www-form-urlencoded"),
                               (multipart, "multipart/form-data; boundary=b")):
        key = new_key()
        found = [buy(app, key, data=data(a), content_type=content_type) for a in (b"1", b"1", b"2")]
        assert [answer.status_code for answer in found] == [200, 200, 422]
        assert (found[1].text, replayed(found[1])) == ("1", True)


@pytest.mark.parametrize("ends", ["reused", "raised", "refused", "in progress", "invalid"])
def test_a_request_is_freed_when_it_ends(idem, ends):
    """With its body, by the last reference, and not by the garbage collector later."""
    requests = []

    def scope(request):
        requests.append(weakref.ref(request._get_current_object()))
        return "u" if ends != "refused" else abort(401)

    app, key = shop(idem, lambda: abort(409) if ends == "raised" else "ok", scope=scope), new_key() if ends != "invalid" else "k"
    other = Idempotency("")
    # Flask itself keeps an abort() that the application does not answer.
    app.register_error_handler(HTTPException, lambda error: ("no", error.code))
    with other.transaction() if ends == "in progress" else nullcontext() as tx:
        assert tx is None or other.on(tx).claim("u", key).outcome == "new"
        ask(app, b"{}", key, 2)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                ask(app, b"x", key, 1)
            assert len(requests) == 6 and [request() for request in requests[:-1]] == [None] * 5
        finally:
            gc.enable()
            if tx is not None:
                other.on(tx).release("u", key)


# More


def test_clients_that_keep_the_context(idem):
    app, key = shop(idem, lambda: "ok"), new_key()
    with app.test_client() as client:
        for number in range(2):
            answer = client.post("/o", data=b"{}", headers={"Idempotency-Key": key})
            assert replayed(answer) == bool(number)
            assert number or (request.path, g.idempotency.scope) == ("/o", "u")


def test_the_guard_of_a_get_guards_its_head(idem, effects):
    key = new_key()

    def order():
        insert(key)
        return "ok"

    app = shop(idem, order, methods=["GET"])
    for _ in range(2):
        answer = app.test_client().head("/o", headers={"Idempotency-Key": key})
        assert (answer.status_code, answer.data) == (200, b"")
    assert replayed(answer) and effects(key) == 1
    assert app.test_client().head("/o").status_code == 400


def test_timeouts_are_503(pool):
    key, sleeps = new_key(), [20, 0]

    def order():
        g.idempotency.tx.execute("SELECT pg_sleep(%s)", (sleeps.pop(0),))
        return "ok"

    app = shop(Idempotency(pool), order, timeout_ms=300)
    began = time.monotonic()
    answer = buy(app, key)
    assert (answer.status_code, answer.json["type"], answer.headers["Retry-After"]) == (
        503, "urn:pg-idempotency:timeout", "1")
    while (again := buy(app, key)).status_code == 409:      # the server has not yet heard of it
        time.sleep(0.02)
    assert again.text == "ok" and time.monotonic() - began < 15


@pytest.mark.parametrize("way", ["generator", "write", "list"])
def test_no_success_goes_out_in_any_way_of_wsgi(idem, way):
    """A middleware within that answers the error of a view with 200."""
    def order():
        raise ZeroDivisionError

    app = shop(idem, order)
    app.config["PROPAGATE_EXCEPTIONS"] = True
    within, closed = app.wsgi_app.app, []

    class Late:
        def __iter__(self):
            self._start(200)
            yield b"fine"

        def close(self):
            closed.append(1)

    def answers(environ, start_response):
        with pytest.raises(ZeroDivisionError):
            within(environ, start_response)
        late = Late()
        late._start = lambda status: start_response("200 OK", [("Content-Length", "4")])
        if way == "generator":
            return late
        write = late._start(200)
        if way == "write":
            write(b"fine")
        return [] if way == "write" else [b"fine"]

    app.wsgi_app.app = answers
    answer = buy(app, new_key())
    assert answer.status_code == 500 and b"rolled-back" in answer.data and len(answer.data) == int(answer.headers["Content-Length"])
    answer.close()
    assert len(closed) == (way == "generator")
