//! What the programs log when they start, and what they serve at the address that they report.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Stdio};
use std::time::Duration;

use super::{command, mistakes::kubeconfig_without_server, tessera};

/// Kills the program, also when the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Starts the program, waits for a line with `says` and the address in it, and returns the answer
/// to a request for `path`.
fn page(arguments: &[&str], says: &str, path: &str) -> String {
    String::from_utf8(bytes(arguments, says, path)).unwrap()
}

/// Returns the answer of [`page`] as it was sent.
fn bytes(arguments: &[&str], says: &str, path: &str) -> Vec<u8> {
    let child = command(arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut running = Running(child);
    // The test stops reading after that line, which must not disturb the program.
    let lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
    let line = lines.map(Result::unwrap).find(|line| line.contains(says)).unwrap();
    let (_, rest) = line.split_once("http://").unwrap();
    let address = rest.split('/').next().unwrap();
    assert!(!address.ends_with(":0"), "{line}");
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer
}

#[test]
fn an_agent_serves_its_cpu_profile_as_pprof_reads_it() {
    let (kubeconfig, folder) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let (kubeconfig, folder) = (kubeconfig.path().to_str().unwrap(), folder.path().to_str().unwrap());
    let agent = ["agent", "--node-name", "n", "--gpus", "simulated:dgx1.txt", "--kubeconfig", kubeconfig];
    let folders = ["--grants", folder, "--kubelet-root", folder];
    let listen = ["--listen", "off", "--probes-listen", "off", "--pprof-address", "127.0.0.1:0"];
    let agent = [&agent[..], &folders, &listen].concat();
    let answer = bytes(&agent, "serving CPU profiles", "/debug/pprof/profile?seconds=1");
    let body = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    let (head, body) = (String::from_utf8_lossy(&answer[..body]), &answer[body..]);
    assert!(head.starts_with("HTTP/1.0 200 "), "{head}");
    assert!(body.starts_with(&[0x1f, 0x8b]), "no gzip: {:?}", &body[..body.len().min(16)]);
}

#[test]
fn port_0_is_replaced_by_the_actual_port() {
    let (kubeconfig, grants) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let kubeconfig = kubeconfig.path().to_str().unwrap();
    let anywhere = ["--listen", "127.0.0.1:0"];
    let gpus = ["--gpus", "simulated:dgx1.txt"];
    let metrics = [&["metrics"][..], &gpus, &anywhere].concat();
    assert!(page(&metrics, "serving ", "/metrics").contains("\ntessera_"));
    let scheduler = ["scheduler", "--kubeconfig", kubeconfig, "--insecure-listen", "127.0.0.1:0"];
    let others = ["--dashboard-listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"];
    let scheduler = [&scheduler[..], &others].concat();
    for (says, path) in
        [(" listening ", "/readyz"), ("answering probes", "/healthz"), ("dashboard", "/version")]
    {
        assert!(page(&scheduler, says, path).starts_with("HTTP/1.0 "), "{says}");
    }
    let grants = grants.path().to_str().unwrap();
    let agent = ["agent", "--node-name", "n", "--grants", grants, "--kubeconfig", kubeconfig];
    let probes = ["--probes-listen", "127.0.0.1:0"];
    let agent = [&agent[..], &["--kubelet-root", grants], &gpus, &anywhere, &probes].concat();
    assert!(page(&agent, "answering probes", "/healthz").contains("ok"));
    let open = [&agent[..], &["--pages-access", "open"]].concat();
    assert!(page(&open, "serving pages ", "/version").contains("\"version\""));
}

/// A unit with `Type=notify` counts as started after the notification, so an agent that cannot serve must not send it.
#[test]
fn the_service_manager_is_notified_when_the_agent_serves() {
    let (kubeconfig, folder) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    let (grants, file) = (folder.path().join("grants"), folder.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let agent = |grants: &std::path::Path| {
        let mut command = command(&["agent", "--node-name", "n", "--gpus", "simulated:dgx1.txt"]);
        command.args(["--listen", "127.0.0.1:0", "--pages-access", "open", "--probes-listen", "off"]);
        command.arg("--kubeconfig").arg(kubeconfig.path()).arg("--kubelet-root").arg(folder.path());
        command.arg("--grants").arg(grants).env("NOTIFY_SOCKET", &socket).stdout(Stdio::null());
        command
    };
    let failed = agent(&file).output().unwrap();
    let error = String::from_utf8_lossy(&failed.stderr);
    assert!(error.contains("cannot create the directory"), "{error}");
    manager.set_nonblocking(true).unwrap();
    let mut buffer = [0; 32];
    assert!(manager.recv(&mut buffer).is_err(), "an agent without a directory for grants is not ready");

    manager.set_nonblocking(false).unwrap();
    // Only a broken agent exceeds this time.
    manager.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut running = Running(agent(&grants).stderr(Stdio::piped()).spawn().unwrap());
    let length = manager.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"READY=1");
    let lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
    let line = lines.map(Result::unwrap).find(|line| line.contains("serving pages ")).unwrap();
    let address = line.split_once("http://").unwrap().1.split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /version HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
}

/// Starts the program with variables of the environment, and returns what it logs until a line contains `last`.
fn log_until(arguments: &[&str], variables: &[(&str, &str)], last: &str) -> Vec<String> {
    let mut command = command(arguments);
    let child = command.envs(variables.iter().copied()).stderr(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut running = Running(child.unwrap());
    let mut logged = Vec::new();
    for line in BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap) {
        let is_last = line.contains(last);
        logged.push(line);
        if is_last {
            return logged;
        }
    }
    panic!("{arguments:?} ended: {logged:#?}");
}

/// The command lines and variables with which the manifests of gpu-admission, gputopology and gpu-manager start them.
#[test]
fn the_command_lines_of_the_original_programs_start_the_daemons() {
    let (kubeconfig, files) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let kubeconfig = kubeconfig.path().to_str().unwrap();
    let file = |name: &str, content: &str| {
        std::fs::write(files.path().join(name), content).unwrap();
        files.path().join(name).to_str().unwrap().to_owned()
    };
    let quota = file(
        "gpu-quota-admission.config",
        r#"{"QuotaConfigMapName": "gpuquota", "QuotaConfigMapNamespace": "kube-system",
            "GPUModelLabel": "gaia.tencent.com/gpu-model", "GPUPoolLabel": "gaia.tencent.com/gpu-pool"}"#,
    );
    let table = file("static-node.json", r#"{"ecs.sccgn6.24xlarge":{"2":[[0,2]]}}"#);
    let others = ["--kubeconfig", kubeconfig, "--dashboard-listen", "off", "--health-listen", "off"];
    let anywhere = "127.0.0.1:0";
    let of_gpu_admission = [
        "--address",
        anywhere,
        "--v=4",
        "--config",
        &quota,
        "--pprofAddress",
        anywhere,
        "--logtostderr=true",
    ];
    let of_gputopology =
        ["-policy", "static", "-config", &table, "--insecure-listen", anywhere, "-logtostderr", "--v=5"];
    let grants = file("grants", "");
    std::fs::remove_file(&grants).unwrap();
    let extra = file("extra-config.json", "{}");
    let agent = ["--gpus", "simulated:dgx1.txt", "--kubeconfig", kubeconfig, "--probes-listen", anywhere];
    let of_gpu_manager = [
        "--share-mode=true",
        "--query-addr=127.0.0.1",
        "--query-port=0",
        "--extra-config",
        &extra,
        "--hostname-override=n",
        "--virtual-manager-path",
        &grants,
        "--device-plugin-path",
        &grants,
        "--cgroup-driver=systemd",
        "--v=5",
    ];
    let variables = [("LOG_LEVEL", "4"), ("EXTRA_FLAGS", "--logtostderr=true --incluster-mode=false")];
    for (arguments, last, expected) in [
        ([&["scheduler"], &of_gpu_admission[..], &others].concat(), " listening ", vec![]),
        ([&["scheduler"], &of_gputopology[..], &others].concat(), " listening ", vec![]),
        ([&["agent"], &of_gpu_manager[..], &agent].concat(), "answering probes", vec!["cgroup-driver"]),
    ] {
        let logged = log_until(&arguments, &variables, last);
        let mut flags: Vec<&str> = logged
            .iter()
            .filter(|line| line.contains("this flag has no effect") && line.contains("reason=\""))
            .filter_map(|line| line.split_once("flag=\"")?.1.split('"').next())
            .collect();
        flags.sort_unstable();
        assert_eq!(flags, [&expected[..], &["incluster-mode", "logtostderr"]].concat(), "{logged:#?}");
    }
}

/// The start scripts of gpu-manager and gpu-admission append `EXTRA_FLAGS` to their own flags, and the last value counts
/// there.
#[test]
fn extra_flags_replace_those_of_the_command_line() {
    let (kubeconfig, folder) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let kubeconfig = kubeconfig.path().to_str().unwrap();
    let others = ["--kubeconfig", kubeconfig, "--dashboard-listen", "off", "--health-listen", "off"];
    // No host has this address, which is reserved for documentation.
    let first =
        ["scheduler", "--address", "192.0.2.1:3456", "--pprofAddress", "192.0.2.1:3457", "--policy=simple"];
    let extra = "--address 127.0.0.1:0 --pprofAddress 127.0.0.1:0 -policy best-effort";
    log_until(&[&first[..], &others].concat(), &[("EXTRA_FLAGS", extra)], " listening ");
    let grants = folder.path().join("grants");
    let agent = [
        &[
            "agent",
            "--gpus",
            "simulated:dgx1.txt",
            "--kubeconfig",
            kubeconfig,
            "--probes-listen",
            "127.0.0.1:0",
        ][..],
        &["--share-mode=true", "--query-addr=192.0.2.1", "--query-port=0", "--hostname-override=n"],
        &[
            "--virtual-manager-path",
            grants.to_str().unwrap(),
            "--device-plugin-path",
            grants.to_str().unwrap(),
        ],
    ];
    log_until(
        &agent.concat(),
        &[("EXTRA_FLAGS", "--share-mode=false --query-addr=127.0.0.1")],
        "answering probes",
    );
}

/// gputopology's manifest mounts its table with `FileOrCreate`, so a host without one has an empty file.
#[test]
fn an_empty_static_table_is_none() {
    let (kubeconfig, table) = (kubeconfig_without_server(), tempfile::NamedTempFile::new().unwrap());
    let (kubeconfig, table) = (kubeconfig.path().to_str().unwrap(), table.path().to_str().unwrap());
    let others = ["--kubeconfig", kubeconfig, "--dashboard-listen", "off", "--health-listen", "off"];
    let arguments = ["scheduler", "-policy", "static", "-config", table, "--insecure-listen", "127.0.0.1:0"];
    let logged = log_until(&[&arguments[..], &others].concat(), &[], " listening ");
    assert!(logged.iter().any(|line| line.contains("the static table is empty")), "{logged:#?}");
}

/// Dashboards of the memory exporter select series by the labels of its documents.
#[test]
fn the_exporter_writes_the_documented_labels_without_a_flag() {
    let folder = tempfile::tempdir().unwrap();
    let gpus = folder.path().join("gpus.txt");
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dgx1.txt"), &gpus).unwrap();
    let pid = std::process::id();
    let process = format!("{{\"pid\":{pid},\"gpu\":3,\"memoryMiB\":2635,\"busyPercent\":40}}\n");
    std::fs::write(folder.path().join("gpus.txt.processes"), process).unwrap();
    let output = tessera(&["metrics", "--gpus", &format!("simulated:{}", gpus.display())]);
    let page = String::from_utf8(output.stdout).unwrap();
    let series = page.lines().find(|line| line.starts_with("pod_used_gpu_mem_MB{")).unwrap();
    assert!(series.contains(&format!("app_pid=\"{pid}\"")) && series.ends_with("} 2635"), "{series}");
    for label in
        ["gpu_name", "gpu_uuid", "pod_name", "pod_namespace", "hostIP", "UUID", "gpu", "pod", "namespace"]
    {
        assert!(series.contains(&format!(",{label}=\"")), "{label} is missing: {series}");
    }
}
