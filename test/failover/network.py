"""
Namespaces of the test's own: users, processes, mounts and networks.

What is started in them ends with their first process, whatever happens to that,
and no network is touched but theirs.  No rights are needed for it, where the
kernel lets users have namespaces.  Where it does not, all servers listen on
addresses of the loopback network, none can be cut off, and who kills the test
with signal 9 leaves them behind.

Each server has two networks: that of the cluster, where it meets the others,
and that of the clients.  Either can be cut.
"""

import os
import signal
import subprocess
import sys

INSIDE = 'IDEMPOTENCY_FAILOVER_INSIDE'
UNSHARE = ['unshare', '--user', '--map-current-user', '--keep-caps', '--net',
           '--mount', '--pid', '--fork', '--kill-child', '--mount-proc']
NETWORKS = {'cluster': '10.88.1.%d', 'clients': '10.88.2.%d'}
LOOPBACK = '127.0.88.%d'
OUTSIDE = 1                 # the host number of HAProxy in the clients' network


def enter():
    """
    Go on in namespaces, in a child of their first process; returns whether
    there are any.
    """
    if os.environ.get(INSIDE):
        child = os.fork()
        if child != 0:
            be_first(child)
        return True
    works = UNSHARE + ['ip', 'link', 'add', 'idem', 'type', 'bridge']
    if subprocess.run(works, stdout=subprocess.DEVNULL,
                      stderr=subprocess.DEVNULL, check=False).returncode == 0:
        os.environ[INSIDE] = 'yes'
        os.execvp(UNSHARE[0], UNSHARE + [sys.executable] + sys.argv)
    return False


def be_first(child):
    """Wait for what is left without a parent; end with the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the child gets it, too
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 255)


class Network:

    def __init__(self, separate):
        self.separate = separate
        self.holders = {}       # host number -> who holds its namespace
        if separate:
            ip('link', 'set', 'lo', 'up')
            for name in NETWORKS:
                ip('link', 'add', name, 'type', 'bridge', 'forward_delay', '0')
                ip('link', 'set', name, 'up')
            ip('address', 'add', NETWORKS['clients'] % OUTSIDE + '/24',
               'dev', 'clients')

    def address(self, network, host):
        return (NETWORKS[network] if self.separate else LOOPBACK) % host

    def add(self, host):
        """A namespace for this host, with a cable to each network."""
        if not self.separate:
            return
        holder = subprocess.Popen(['unshare', '--net', 'sh', '-c',
                                   'echo ready; exec sleep infinity'],
                                  stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE)
        holder.stdout.readline()
        self.holders[host] = holder
        self.run(host, 'ip', 'link', 'set', 'lo', 'up')
        for name, address in NETWORKS.items():
            ip('link', 'add', '%s%d' % (name, host), 'type', 'veth', 'peer',
               'name', name, 'netns', str(holder.pid))
            self.run(host, 'ip', 'address', 'add', address % host + '/24',
                     'dev', name)
            self.run(host, 'ip', 'link', 'set', name, 'up')
            ip('link', 'set', '%s%d' % (name, host), 'up')
            self.plug(host, name)

    def command(self, host, *command):
        """The command that runs this one there."""
        if not self.separate:
            return list(command)
        return ['nsenter', '--net', '--target', str(self.holders[host].pid),
                *command]

    def run(self, host, *command):
        check(self.command(host, *command))

    def cut(self, host, network):
        """Packets are lost without an error."""
        ip('link', 'set', '%s%d' % (network, host), 'nomaster')

    def plug(self, host, network):
        ip('link', 'set', '%s%d' % (network, host), 'master', network)


def ip(*arguments):
    check(['ip', *arguments])


def check(command):
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise OSError('%s: %s' % (' '.join(command), done.stdout))
