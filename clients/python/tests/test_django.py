"""Django: the guard of a view, and requests and jobs on Django's connection."""

import gc
import io
import json
import os
import signal
import threading
import time
import unittest
from contextlib import suppress

import psycopg
import pytest
from proxy import Proxy

from pg_idempotency import Idempotency, InProgress, Response, TimedOut, TransactionEnded, new_key

django = pytest.importorskip("django")
from django.conf import settings  # noqa: E402
from django.contrib.auth.decorators import login_required  # noqa: E402
from django.core.exceptions import PermissionDenied  # noqa: E402
from django.db import connection, connections, models, transaction  # noqa: E402
from django.db.utils import DatabaseError, OperationalError  # noqa: E402
from django.http import FileResponse, HttpResponse, JsonResponse, StreamingHttpResponse  # noqa: E402
from django.test import Client, RequestFactory, TestCase  # noqa: E402
from django.utils.decorators import method_decorator  # noqa: E402
from django.views import View  # noqa: E402

urlpatterns = []


class Failure(Exception):
    pass


class AnswerFailures:
    """An application that answers errors itself."""

    status = None

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        request.user_name = request.META.get("HTTP_AUTHORIZATION")
        return self.get_response(request)

    def process_exception(self, request, error):
        if self.status and isinstance(error, Failure):
            return HttpResponse("answered", status=self.status)


@pytest.fixture(scope="module")
def site(database):
    one = {"ENGINE": "django.db.backends.postgresql", "NAME": database, "HOST": os.environ.get("PGHOST", ""),
           "PORT": os.environ.get("PGPORT", ""), "USER": os.environ.get("PGUSER", "")}
    settings.configure(
        DATABASES={"default": one, "kept": {**one, "CONN_MAX_AGE": None}}, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["pg_idempotency.django.IdempotencyMiddleware", f"{__name__}.AnswerFailures",
                    "django.middleware.csrf.CsrfViewMiddleware"],
        PG_IDEMPOTENCY={"wait": "5s"}, SECRET_KEY="for tests", USE_TZ=True, REST_FRAMEWORK={"UNAUTHENTICATED_USER": None},
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"], LOGGING_CONFIG=None)
    django.setup()
    yield
    connections.close_all()


@pytest.fixture(scope="module")
def Effect(site):
    class Effect(models.Model):
        name = models.TextField(primary_key=True)

        class Meta:
            app_label = "tests"
            db_table = "effects"
            managed = False

    return Effect


@pytest.fixture
def serve(site):
    """serve(view) routes /o to it, and returns what sends a request with a key."""
    from django.urls import clear_url_caches, path

    def serve(view, **options):
        urlpatterns[:] = [path("o", view)]
        clear_url_caches()
        browser = Client(raise_request_exception=False, **options)

        def send(key, data=b"{}", content_type="application/json", **headers):
            if key is not None:
                headers["HTTP_IDEMPOTENCY_KEY"] = key
            return browser.generic("POST", "/o", data, content_type, **headers)

        return send

    yield serve
    AnswerFailures.status = None


def guard(**options):
    from pg_idempotency.django import Guard

    return Guard(**{"scope": lambda request: "u", **options})


def replayed(answer):
    return answer.get("Idempotent-Replayed") == "true"


@pytest.fixture
def core(site):
    from pg_idempotency.django_orm import Django

    return Idempotency(Django())


def test_models_write_in_the_transaction_of_the_claim(serve, Effect, effects):
    key, after = new_key(), []

    @guard()
    def view(request):
        Effect.objects.create(name=key)
        assert request.idempotency.tx.in_atomic_block and request.idempotency.key == key
        transaction.on_commit(lambda: after.append(effects(key)))
        response = JsonResponse({"name": key}, status=201)
        response["Location"] = "/o/1"
        response.set_cookie("seen", "1")
        return response

    send = serve(view)
    first, again, spaced = send(key), send(key), send(key, b" { } ")
    for answer in again, spaced:
        assert (answer.status_code, answer.content, answer["Location"], answer["Content-Type"]) == (
            201, first.content, "/o/1", "application/json")
        assert replayed(answer) and not answer.cookies
    assert not replayed(first) and first.cookies and effects(key) == 1 and after == [1]
    assert send(key, b'{"other": 1}').status_code == 422
    assert send(None).status_code == 400


def test_a_nested_atomic_is_a_savepoint(serve, Effect, effects):
    kept, undone = new_key(), new_key()

    @guard()
    def view(request):
        Effect.objects.create(name=kept)
        with pytest.raises(Failure), transaction.atomic():
            Effect.objects.create(name=undone)
            raise Failure
        return HttpResponse()

    assert serve(view)(new_key()).status_code == 200
    assert (effects(kept), effects(undone)) == (1, 0)


@pytest.mark.parametrize("error", ["40001", "in progress", "refused", "other"])
def test_a_hook_that_fails_after_commit_is_not_a_failed_request(serve, Effect, effects, error):
    """The view does not run again, and its client does not get a replay."""
    key, runs = new_key(), []

    def hook():
        runs.append("hook")
        if error == "40001":
            connection.cursor().execute("DO $$BEGIN RAISE 'hook' USING ERRCODE = '40001'; END$$")
        raise {"in progress": InProgress("of another request"), "refused": ConnectionRefusedError()}.get(error, Failure())

    @guard()
    def view(request):
        runs.append("view")
        Effect.objects.create(name=key)
        transaction.on_commit(hook)
        return HttpResponse(status=201)

    send = serve(view)
    first, again = send(key), send(key)
    assert (first.status_code, replayed(first), again.status_code, replayed(again)) == (500, False, 201, True)
    assert runs == ["view", "hook"] and effects(key) == 1


@pytest.mark.parametrize("ends", ["raised", "answered", "denied", 503, 401, "swallowed", "set_rollback", "close", "pieces", "length"])
def test_no_success_goes_out_for_what_was_rolled_back(serve, Effect, effects, ends, caplog):
    key = new_key()
    AnswerFailures.status = 200 if ends == "answered" else None

    @guard()
    def view(request):
        Effect.objects.create(name=key)
        if ends in ("raised", "answered"):
            raise Failure
        if ends == "denied":
            raise PermissionDenied
        if ends == "swallowed":
            with pytest.raises(DatabaseError):
                connection.cursor().execute("SELECT 1 / 0")
        if ends == "set_rollback":
            transaction.set_rollback(True)
        if ends == "close":
            connection.close()
        if ends == "pieces":
            return StreamingHttpResponse(iter([b"a", b"b"]))
        if ends == "length":
            return HttpResponse(b"ab", headers={"Content-Length": "3"})
        return HttpResponse(status=ends if isinstance(ends, int) else 200)

    send = serve(view)
    for _ in range(2):
        answer = send(key)
        assert answer.status_code == {"denied": 403}.get(ends, ends if isinstance(ends, int) else 500)
        assert not replayed(answer) and effects(key) == 0
    assert not connection.in_atomic_block


def test_a_replay_is_for_those_who_have_logged_in(serve, Effect, effects):
    key = new_key()

    def login_required(view):
        return lambda request: view(request) if request.user_name else HttpResponse(status=401)

    @login_required
    @guard(scope=lambda request: request.user_name)
    def view(request):
        Effect.objects.create(name=key)
        return HttpResponse(status=201)

    send = serve(view)
    assert [send(key, **headers).status_code for headers in ({}, {"HTTP_AUTHORIZATION": "ann"}, {"HTTP_AUTHORIZATION": "ann"}, {})
            ] == [401, 201, 201, 401]
    assert effects(key) == 1


def test_methods_of_classes_and_template_responses(serve, Effect, effects):
    from django.template import engines
    from django.template.response import TemplateResponse

    key = new_key()

    @method_decorator(guard(), name="post")
    class Order(View):
        def post(self, request):
            Effect.objects.create(name=key)
            template = engines["django"].from_string("{{ effect.name }}")
            return TemplateResponse(request, template, {"effect": Effect.objects.get(name=key)})

    with_templates = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
    from django.test import override_settings
    with override_settings(TEMPLATES=with_templates):
        send = serve(Order.as_view())
        first, again = send(key), send(key)
    assert first.content == again.content == key.encode() and replayed(again) and effects(key) == 1


def test_a_guard_before_the_checks_of_a_class_is_an_error(serve):
    """A replay would skip its mixins, and a redirect to the login would be stored."""
    from django.contrib.auth.mixins import LoginRequiredMixin

    class Order(LoginRequiredMixin, View):
        def post(self, request):
            raise AssertionError

    for wrong in Order.as_view(), login_required(Order.as_view()), Order.dispatch:
        with pytest.raises(TypeError, match=r"in dispatch\(\), such as LoginRequiredMixin"):
            guard()(wrong)

    @method_decorator([transaction.non_atomic_requests, guard()], name="dispatch")
    class Early(Order):
        pass

    from django.urls import path
    urlpatterns[:] = [path("o", Early.as_view())]
    with pytest.raises(TypeError, match=r"in dispatch\(\), such as LoginRequiredMixin"):
        Client().post("/o", HTTP_IDEMPOTENCY_KEY=new_key())

    @guard()
    def dispatch(request):
        return HttpResponse("ok")

    assert serve(dispatch)(new_key()).content == b"ok"


def test_processes_share_no_connection_after_a_fork(core):
    """They would read each other's answers."""
    def server(tx):
        with tx.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return Response(200, str(cursor.fetchone()[0]))

    own = core.request("u", new_key(), server).body
    child = os.fork()
    if not child:
        signal.alarm(30)
        with suppress(BaseException):
            gc.collect()
            os._exit(int(core.request("u", new_key(), server).body == own))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert core.request("u", new_key(), server).body == own


def test_middleware_that_tries_again(serve, Effect, effects):
    """What was rolled back runs again, and what was committed does not run, and sends no other response."""
    key, commits = new_key(), []

    @guard()
    def view(request):
        Effect.objects.create(name=key)
        if not commits:
            raise Failure
        return HttpResponse("done")

    def outer(request):
        try:
            view(request)
        except Failure:
            commits.append(True)
            view(request)
        return view(request)

    send = serve(outer)
    for _ in range(2):
        assert send(key).status_code == 500 and effects(key) == 1
    assert serve(view)(key).content == b"done"


def test_rest_framework(serve, Effect, effects):
    """Behind its authentication, and with its renderers."""
    pytest.importorskip("rest_framework")
    from rest_framework import response, views
    from rest_framework.authentication import BaseAuthentication
    from rest_framework.decorators import api_view, authentication_classes, permission_classes
    from rest_framework.exceptions import ValidationError
    from rest_framework.permissions import BasePermission

    class Header(BaseAuthentication):
        def authenticate(self, request):
            name = request.META.get("HTTP_AUTHORIZATION")
            return (name, None) if name else None

    class LoggedIn(BasePermission):
        def has_permission(self, request, view):
            return bool(request.user)

    def order(request):
        Effect.objects.create(name=request.data["name"])
        if request.data.get("fails"):
            raise ValidationError("refused")
        return response.Response({"name": request.data["name"]}, 201)

    class Order(views.APIView):
        authentication_classes, permission_classes = [Header], [LoggedIn]

        @guard(scope=lambda request: request.user)
        def post(self, request):
            return order(request)

    @api_view(["POST"])
    @authentication_classes([Header])
    @permission_classes([LoggedIn])
    @guard(scope=lambda request: request.user)
    def function(request):
        return order(request)

    @method_decorator(guard(), name="dispatch")
    class Early(Order):
        pass

    assert serve(Early.as_view())(new_key()).status_code == 500
    for wrong in Order.as_view(), api_view(["POST"])(lambda request: None):
        with pytest.raises(TypeError, match="before the authentication"):
            guard()(wrong)
    tries = []

    @api_view(["POST"])
    @guard()
    def again(request):
        tries.append(request.data.pop("name"))
        if len(tries) == 1:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$")
        return response.Response(tries, 201)

    assert serve(again)(new_key(), json.dumps({"name": "ann"})).json() == ["ann", "ann"]
    for view in Order.as_view(), function:
        send, key = serve(view), new_key()
        body = json.dumps({"name": key})
        assert send(key, body).status_code == 403
        first, again = (send(key, body, HTTP_AUTHORIZATION="ann") for _ in range(2))
        assert (first.status_code, first.json(), again.content, again["Content-Type"], replayed(again)) == (
            201, {"name": key}, first.content, "application/json", True)
        assert send(key, body).status_code == 403 and effects(key) == 1
        key = new_key()
        body = json.dumps({"name": key, "fails": True})
        assert [(answer := send(key, body, HTTP_AUTHORIZATION="ann")).status_code for _ in range(2)] == [400, 400]
        assert not replayed(answer) and effects(key) == 0


def test_forms(serve, Effect, effects):
    """Also those that Django has read before the view, to check their CSRF token."""
    from django.middleware.csrf import _get_new_csrf_string as secret

    key, token = new_key(), secret()

    @guard()
    def view(request):
        Effect.objects.create(name=key)
        if effects(key + "try") == 0:
            with psycopg.connect("", autocommit=True) as other:
                other.execute("INSERT INTO effects VALUES (%s)", (key + "try",))
            request.FILES["file"].read()
            connection.cursor().execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
        return HttpResponse(request.FILES["file"].read() + request.POST["text"].encode())

    send = serve(view, enforce_csrf_checks=True)

    def form(text):
        upload = io.BytesIO(b"content")
        upload.name = "file"
        request = RequestFactory().post("/o", {"csrfmiddlewaretoken": token, "_idempotency_key": key, "text": text, "file": upload})
        return send(None, request.body, request.META["CONTENT_TYPE"], HTTP_COOKIE=f"csrftoken={token}")

    assert send(key).status_code == 403
    first, again, other = form("one"), form("one"), form("two")
    assert (first.status_code, first.content, again.content, replayed(again)) == (200, b"contentone", b"contentone", True)
    assert other.status_code == 422 and effects(key) == 1


def test_a_view_reads_the_body_of_a_form(serve):
    """As without the guard, which may have looked for a key in the form."""
    made = RequestFactory().post("/o", {"text": "x", "_idempotency_key": new_key()})
    for key in (None, new_key()):
        found = serve(guard()(lambda request: HttpResponse(request.body + request.POST["text"].encode())))(
            key, made.body, made.META["CONTENT_TYPE"])
        assert (found.status_code, found.content) == (200, made.body + b"x")


def test_a_body_is_read_up_to_a_limit(serve):
    @guard(max_request_size=1000)
    def view(request):
        return HttpResponse(request.body)

    send = serve(view)
    assert send(new_key(), b"x" * 1000, "text/plain").status_code == 200
    for content_type in "text/plain", "multipart/form-data; boundary=x":
        answer = send(new_key(), b"x" * 1001, content_type)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:pg-idempotency:request-too-large")
    cut = {"CONTENT_LENGTH": "11", "wsgi.input": io.BytesIO(b"x" * 10)}
    assert send(new_key(), b"x" * 10, "text/plain", **cut).status_code == 400


def test_a_view_does_not_see_the_range_of_the_first_request(serve):
    @guard()
    def view(request):
        return HttpResponse(str(["HTTP_RANGE" in request.META, "Range" in request.headers]))

    assert serve(view)(new_key(), HTTP_RANGE="bytes=2-4").content == b"[False, False]"


def test_files_and_sizes_that_are_known(serve, tmp_path):
    (tmp_path / "file").write_bytes(b"content")

    @guard()
    def view(request):
        return FileResponse((tmp_path / "file").open("rb"))

    send, key = serve(view), new_key()
    first, again = send(key), send(key)
    assert b"".join(first.streaming_content) == again.content == b"content" and replayed(again)


def test_atomic_requests(serve, Effect, effects):
    """A view with a guard is not atomic; where Django cannot see it, it is refused."""
    key = new_key()

    def order(request):
        Effect.objects.create(name=key)
        return HttpResponse()

    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        send = serve(guard()(order))
        assert send(key).status_code == 200 and replayed(send(key))
        hidden = guard()(order)
        assert serve(lambda request: hidden(request))(new_key()).status_code == 500
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert effects(key) == 1


def test_atomic_requests_of_another_database_are_refused(serve, Effect, effects):
    """Its transaction would be around all tries, and commit after the response was stored."""
    key = new_key()

    @guard()
    def order(request):
        Effect.objects.using("kept").create(name=key)
        return HttpResponse()

    connections["kept"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        assert serve(order)(key).status_code == 500 and effects(key) == 0
        assert serve(transaction.non_atomic_requests(using="kept")(order))(key).status_code == 200
    finally:
        connections["kept"].settings_dict["ATOMIC_REQUESTS"] = False
    assert effects(key) == 1


def test_in_a_test_case(serve, Effect, effects):
    """Whose transaction is around all."""
    key = new_key()

    @guard()
    def view(request):
        Effect.objects.create(name=key)
        return HttpResponse()

    send = serve(view)

    class Test(TestCase):
        def runTest(self):
            assert [replayed(send(key)) for _ in range(2)] == [False, True]
            assert Effect.objects.filter(name=key).count() == 1

    result = unittest.TestResult()
    unittest.TestSuite([Test()]).run(result)
    assert result.testsRun == 1 and not result.errors and not result.failures, (result.errors, result.failures)
    assert effects(key) == 0


def test_a_guard_that_cannot_run_is_an_error(serve):
    from django.test import override_settings

    async def asynchronous(request):
        return HttpResponse()

    for wrong in asynchronous, View:
        with pytest.raises(TypeError):
            guard()(wrong)
    with pytest.warns(UserWarning, match="decorators below the guard"):
        guard()(login_required(lambda request: HttpResponse()))
    with override_settings(MIDDLEWARE=[]):
        assert serve(guard()(lambda request: HttpResponse()))(new_key()).status_code == 500


def test_another_try_reads_the_body_again(serve, effects):
    key, seen = new_key(), []

    @guard()
    def view(request):
        seen.append(request.read())
        request.idempotency.tx.cursor().execute("INSERT INTO effects VALUES (%s)", [key])
        if len(seen) < 2:
            error = DatabaseError()
            error.__cause__ = psycopg.errors.SerializationFailure()
            raise error
        return HttpResponse()

    assert serve(view)(key, b"{}").status_code == 200 and seen == [b"{}", b"{}"] and effects(key) == 1


@pytest.mark.parametrize("end", ["complete", "rolled back"])
def test_requests_run_on_the_connection_of_django(core, Effect, effects, end):
    key = new_key()

    def place(tx):
        Effect.objects.create(name=key)
        assert core.on(tx).once("django", key) and core.on(connections["default"]).claim("100%", new_key()).outcome == "new"
        if end == "rolled back":
            raise Failure
        return Response.json({"name": key}, 201)

    for _ in range(2):
        try:
            assert core.request("u", key, place).status == 201
        except Failure:
            assert end == "rolled back"
    assert effects(key) == (end == "complete")
    with pytest.raises(RuntimeError, match="cannot run in transaction.atomic"), transaction.atomic():
        core.request("u", new_key(), place)
    with core.transaction() as tx:
        assert tx is connections["default"] and tx.in_atomic_block
    with pytest.raises(TransactionEnded), core.transaction():
        transaction.set_rollback(True)
    with pytest.raises(TransactionEnded):
        core.request("u", new_key(), lambda tx: transaction.atomic().__enter__() or Response())
    assert not connection.in_atomic_block and not connection.savepoint_ids


def test_a_connection_that_the_handler_replaces_is_no_success(core, Effect, effects):
    key = new_key()

    def place(tx):
        tx.close()
        tx.connect()
        Effect.objects.create(name=key)
        return Response(201)

    with pytest.raises(TransactionEnded):
        core.request("u", key, place)
    assert effects(key) == 1                    # committed by the handler's own connection, once


def test_a_job(core, Effect, effects):
    key, steps, name = new_key(), [], new_key()

    def pay(job):
        job.step("charge", lambda step: steps.append(1))
        if len(steps) == 1 and job.attempt == 1:
            raise Failure
        return job.finish(lambda tx: Effect.objects.create(name=name) and Response(201))

    def connections_of_threads():
        with psycopg.connect("") as other:
            return other.execute("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%heartbeat%%' AND state = 'idle'"
                                 " AND backend_type = 'client backend' AND pid <> %s", (own,)).fetchone()[0]

    with pytest.raises(Failure):
        core.job("u", key, pay)
    assert core.job("u", key, pay).status == 201 and core.job("u", key, pay).replayed
    assert (len(steps), effects(name)) == (1, 1)
    connection.ensure_connection()
    own = connection.cursor().connection.info.backend_pid
    busy = threading.Event()
    core.job("u", new_key(), lambda job: job.step("waits", lambda step: busy.wait(1.5)) or Response(), lease="1 s")
    assert connections_of_threads() == 0


def test_a_handler_has_a_timeout(core, effects):
    key = new_key()

    def place(tx):
        with tx.cursor() as cursor:
            cursor.execute("INSERT INTO effects VALUES (%s)", (key,))
            cursor.execute("SELECT pg_sleep(60)")

    with pytest.raises(TimedOut):
        core.request("u", key, place, timeout="300 ms")
    assert not connection.in_atomic_block
    # The session of the first attempt may end a moment later.
    assert core.request("u", key, lambda tx: Response(), wait="10 s").stored and effects(key) == 0


def test_a_handler_that_took_too_long_leaves_no_dead_connection(core, effects, slow_cancel):
    def place(tx):
        with tx.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    with pytest.raises(TimedOut):
        core.request("u", new_key(), place, timeout="300 ms")
    time.sleep(1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def test_autocommit_that_is_off_is_refused(core, effects):
    """Django would not commit, and the response would say that it did."""
    key = new_key()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TypeError, match="autocommit"):
            core.request("u", key, lambda tx: tx.cursor().execute("INSERT INTO effects VALUES (%s)", (key,)) or Response())
        connection.rollback()
    finally:
        transaction.set_autocommit(True)
    assert effects(key) == 0 and core.request("u", key, lambda tx: Response()).stored


def test_a_server_that_cannot_be_reached_is_tried_once(site, monkeypatch):
    from pg_idempotency.django_orm import Django

    tries, kind = [], type(connections["default"])
    connect = kind.get_new_connection
    connections.databases["nowhere"] = {**connections.databases["default"], "HOST": "/nowhere"}
    monkeypatch.setattr(kind, "get_new_connection", lambda self, found: tries.append(1) or connect(self, found))
    idem = Idempotency(Django("nowhere"))
    try:
        for call in (lambda: idem.request("u", new_key(), lambda tx: Response()), lambda: idem.job("u", new_key(), lambda job: Response())):
            with pytest.raises(OperationalError):
                call()
    finally:
        del connections["nowhere"], connections.databases["nowhere"]
    assert len(tries) == 2


def test_a_connection_that_is_lost_while_it_is_made_is_replaced(core, monkeypatch):
    """By the next request, also in a thread that serves no requests of Django, which would close it."""
    def lost(self):
        with psycopg.connect("", autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (self.connection.info.backend_pid,))
        monkeypatch.setattr(type(self), "init_connection_state", init)
        init(self)

    connection.close()
    init = type(connections["default"]).init_connection_state
    monkeypatch.setattr(type(connections["default"]), "init_connection_state", lost)
    with pytest.raises(OperationalError):
        core.request("u", new_key(), lambda tx: Response())
    assert core.request("u", new_key(), lambda tx: Response()).stored


def test_a_silent_server_holds_no_request(site, silent_server, serves_beside_silence):
    """Nor does it stop the other threads."""
    from pg_idempotency.django_orm import Django

    connections.databases["silent"] = {**connections.databases["default"], "HOST": "127.0.0.1", "PORT": silent_server[0].port}
    try:
        serves_beside_silence(Idempotency(Django("silent")),
                              lambda tx, key: tx.cursor().execute("INSERT INTO effects VALUES (%s)", (key,)),
                              lambda tx: tx.cursor().execute("SELECT 77"))
    finally:
        connections["silent"].close()
        del connections["silent"], connections.databases["silent"]


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_lost_commit_takes_effect_once(database, site, effects, cut):
    from pg_idempotency.django_orm import Django

    proxy, key, runs = Proxy(), new_key(), []
    connections.databases["lost"] = {**connections.databases["default"], "HOST": "127.0.0.1", "PORT": proxy.port}
    try:
        def place(tx):
            runs.append(1)
            with tx.cursor() as cursor:
                cursor.execute("INSERT INTO effects VALUES (%s)", (key,))
            return Response(201)

        proxy.cut = cut
        assert Idempotency(Django("lost")).request("u", key, place).replayed == (cut == "after")
        assert effects(key) == 1 and len(runs) == (2 if cut == "before" else 1)
    finally:
        connections["lost"].close()
        del connections["lost"], connections.databases["lost"]
        proxy.close()


def test_a_connection_that_the_server_has_ended_is_replaced(site):
    from pg_idempotency.django_orm import Django

    idem, runs = Idempotency(Django("kept")), []
    idem.once("kept", new_key())

    def end():
        with connections["kept"].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pid = cursor.fetchone()[0]
        with psycopg.connect("", autocommit=True) as other:
            assert other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,)).fetchone()[0]

    def pay(job):
        job.step("charge", lambda step: end() or runs.append(1))
        return Response(201)

    end()
    assert idem.request("u", new_key(), lambda tx: Response()).stored
    assert idem.job("u", new_key(), pay).status == 201 and runs == [1]
