//! Attacks of clients without credentials on the real program: connections that are never used, and bodies that need
//! much more memory than they have bytes. The program answers its probes and needs little memory.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tessera_sim::apiserver::ApiServer;

use super::command;

/// The memory that an attack may make the program use.
const MAX_MEMORY_MIB: u64 = 256;

/// An attack ends after this time, because the test waits for an answer that never comes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running program, killed when the test ends.
struct Program {
    child: Child,
    lines: Vec<String>,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Program {
    /// Starts the program and reads its log up to a line with this text.
    fn start(arguments: &[&str], until: &str) -> Self {
        let mut child = command(arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut lines = Vec::new();
        while !lines.last().is_some_and(|line: &String| line.contains(until)) {
            let mut line = String::new();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "{arguments:?} ended: {lines:?}");
            lines.push(line);
        }
        // The program must not wait for a reader of its log.
        std::thread::spawn(move || drop(std::io::copy(&mut log, &mut std::io::sink())));
        Self { child, lines }
    }

    /// Returns the address in the log line with this text.
    fn address(&self, text: &str) -> SocketAddr {
        let line = self.lines.iter().find(|line| line.contains(text)).unwrap();
        let (_, rest) = line.split_once("://").unwrap();
        rest.split('/').next().unwrap().parse().unwrap()
    }

    /// Returns the largest memory that the program has used so far.
    fn peak_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }
}

/// Returns the answer to a request, or nothing if the server closes the connection.
fn ask(address: SocketAddr, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let length = body.len();
    let head = format!(
        "{head} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    let mut answer = Vec::new();
    if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).is_ok() {
        let _reset = stream.read_to_end(&mut answer);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// Asks for a probe and reports how long the answer took.
#[allow(clippy::print_stderr, reason = "the time is reported, but no test depends on it")]
fn probe(address: SocketAddr, during: &str) {
    let begun = Instant::now();
    let answer = ask(address, "GET /healthz", b"");
    assert!(answer.starts_with("HTTP/1.1 200"), "{during}: {answer}");
    eprintln!("{during}: /healthz answered after {} ms", begun.elapsed().as_millis());
}

/// The begin of a request head.
const HEAD: &[u8] = b"POST /scheduler/filter HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ";

/// The begin of a TLS handshake: a record of 512 bytes, of which one is sent.
const HANDSHAKE: &[u8] = b"\x16\x03\x01\x02\x00\x01";

/// Opens connections that send a begin and never the rest.
fn half_open(address: SocketAddr, count: usize, begin: &[u8]) -> Vec<TcpStream> {
    let open = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        let _closed = stream.write_all(begin);
        stream
    };
    (0..count).map(open).collect()
}

/// Sends bodies of empty containers from several clients at once.
fn send_hostile_bodies(address: SocketAddr) {
    let containers = vec!["{}"; 5_000_000].join(",");
    let body = format!(r#"{{"Pod":{{"spec":{{"containers":[{containers}]}}}},"NodeNames":[]}}"#);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let answer = ask(address, "POST /scheduler/filter", body.as_bytes());
                assert!(answer.contains("elements"), "{answer}");
            });
        }
    });
}

#[allow(clippy::print_stderr, reason = "the memory is reported")]
fn check_memory(program: &Program, attack: &str) {
    let peak = program.peak_mib();
    eprintln!("{attack}: peak memory {peak} MiB");
    assert!(peak < MAX_MEMORY_MIB, "{attack}: {peak} MiB");
}

#[test]
fn the_scheduler_survives_idle_connections_and_hostile_bodies() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let api = runtime.block_on(ApiServer::start()).unwrap();
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(kubeconfig.path(), api.kubeconfig()).unwrap();
    let anywhere = "127.0.0.1:0";
    let arguments = ["scheduler", "--kubeconfig", kubeconfig.path().to_str().unwrap()];
    let listeners =
        ["--insecure-listen", anywhere, "--dashboard-listen", anywhere, "--health-listen", anywhere];
    let program = Program::start(&[&arguments[..], &listeners].concat(), "ready");
    let open = program.address(" listening ");
    let health = program.address("answering probes");
    for target in [open, health, program.address("serving the dashboard")] {
        let idle = half_open(target, 1_000, HEAD);
        probe(health, "idle connections, on the listener of the probes");
        probe(open, "idle connections, on the open listener");
        drop(idle);
    }
    check_memory(&program, "idle connections");
    send_hostile_bodies(open);
    probe(health, "hostile bodies");
    check_memory(&program, "hostile bodies");
}

#[test]
fn the_agent_survives_idle_connections() {
    let (kubeconfig, grants) = (super::mistakes::kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let grants = grants.path().to_str().unwrap();
    let arguments = ["agent", "--node-name", "n", "--gpus", "simulated:dgx1.txt", "--listen", "127.0.0.1:0"];
    let probes = ["--probes-listen", "127.0.0.1:0"];
    let files =
        ["--kubeconfig", kubeconfig.path().to_str().unwrap(), "--grants", grants, "--kubelet-root", grants];
    for (access, begin) in [("open", HEAD), ("authenticated", HANDSHAKE)] {
        let arguments = [&arguments[..], &probes, &files, &["--pages-access", access]].concat();
        let program = Program::start(&arguments, "starting the agent");
        let (pages, probes) = (program.address("serving pages"), program.address("answering probes"));
        for target in [pages, probes] {
            let idle = half_open(target, 1_000, begin);
            probe(probes, access);
            drop(idle);
        }
        check_memory(&program, access);
    }
}
