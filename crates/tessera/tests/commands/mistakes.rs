use super::{command, tessera};

/// Checks the exit code and the texts on standard error.
fn check(arguments: &[&str], code: i32, words: &[&str]) {
    let output = tessera(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    for word in words {
        assert!(error.contains(word), "{arguments:?}: {error}");
        assert_eq!(error.matches(word).count(), 1, "repeated: {error}");
    }
    assert!(!error.contains('\u{1b}'), "colour for a file: {error:?}");
}

#[test]
fn a_host_without_gpus_exits_with_1_and_a_remedy() {
    for command in ["inventory", "metrics"] {
        check(&[command, "--gpus", "simulated:none"], 1, &["error: cannot read", "none"]);
        let output = tessera(&[command, "--gpus", "nvml"]);
        // On a host with a driver this command succeeds.
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(error.starts_with("error: ") && error.contains("--gpus simulated:FILE"), "{error}");
        }
    }
}

#[test]
fn without_a_cluster_the_daemons_name_the_files_they_tried() {
    let grants = tempfile::tempdir().unwrap();
    let grants = grants.path().to_str().unwrap();
    let agent = ["agent", "--node-name", "n", "--gpus", "simulated:dgx1.txt", "--grants", grants];
    let scheduler = ["scheduler", "--insecure-listen", "127.0.0.1:0"];
    for daemon in [&agent[..], &scheduler] {
        check(
            daemon,
            2,
            &["error: found no Kubernetes cluster", "/nonexistent/.kube/config", "--kubeconfig FILE"],
        );
        check(
            &[daemon, &["--kubeconfig", "none"]].concat(),
            2,
            &["kubeconfig none: No such file or directory"],
        );
        check(&[daemon, &["--log", "=="]].concat(), 2, &["write error, warn, info or debug"]);
    }
}

/// Like kubectl: no file where the variable is empty, several files where it lists several.
#[test]
fn the_variable_kubeconfig_is_read_as_kubectl_reads_it() {
    let run = |variable: &str, arguments: &[&str]| {
        let output = command(arguments).env("KUBECONFIG", variable).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let scheduler = ["scheduler", "--insecure-listen", "127.0.0.1:0"];
    for asked in [&scheduler[..], &["migrate", "check"]] {
        let (code, error) = run("", asked);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("found no Kubernetes cluster"), "{asked:?}: {error}");
        let (code, error) = run("none", asked);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("cannot use the kubeconfig none: No such file"), "{asked:?}: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, content).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let context = "{name: c, context: {cluster: k, user: u}}";
    let parts = [
        write("one", &format!("current-context: c\ncontexts: [{context}]\nusers: [{{name: u, user: {{}}}}]")),
        write("two", "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]"),
    ];
    let (code, error) = run(&parts.join(":"), &["migrate", "check"]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("http://127.0.0.1:1: "), "{error}");
    // The files of a listing are read, whatever the variable names.
    let listing = write("all.json", r#"{"kind": "List", "items": []}"#);
    let (code, error) = run("none", &["migrate", "check", &listing]);
    assert_eq!((code, error.as_str()), (Some(0), ""));
}

#[test]
fn errors_about_values_say_what_to_write() {
    let address = "write an address and a port";
    check(&["demo", "--listen", "here"], 2, &[address]);
    check(&["scheduler", "--listen", "here"], 2, &[address]);
    check(&["metrics", "--listen", "here"], 2, &[address]);
    check(&["agent", "--node-name", "n", "--listen", "here"], 2, &[address]);
    check(
        &["agent", "--node-name", "n", "--advertise", "http://10.0.0.5:5678"],
        2,
        &["the pages need HTTPS", "--pages-access open"],
    );
    check(
        &["scheduler", "--insecure-listen", "127.0.0.1:0", "--pages-access", "authenticated"],
        2,
        &["tokens must not travel over plain HTTP to 0.0.0.0:12346", "--certificates-in"],
    );
    check(&["demo", "--for", "soon"], 2, &["30s or 2m"]);
    check(&["demo", "--pods", "-1"], 2, &["--pods: write a rate"]);
    check(&["demo", "--nodes", "0"], 2, &["--nodes 1 or more"]);
    check(&["demo", "--topology", "none"], 2, &["cannot read none"]);
    check(
        &["demo", "--kubeconfig-out", "/nonexistent/k"],
        2,
        &["error: cannot write /nonexistent/k: No such"],
    );
    check(&["inventory", "--gpus", "cuda"], 2, &["write nvml or simulated:FILE"]);
    check(&["place", "--topology", "dgx1.txt", "--request", "two"], 2, &["write whole:2"]);
    check(&["scheduler", "--quota-config", "none"], 2, &["cannot read none"]);
    check(&["scheduler"], 2, &["the verbs need certificates", "--insecure-listen 127.0.0.1:12345"]);
    check(&["scheduler", "--listen", ":0", "--insecure-listen", ":0"], 2, &["the verbs need certificates"]);
    check(&["scheduler", "--verbs-on-loopback", "0.0.0.0:12345"], 2, &["the address is always 127.0.0.1"]);
    let of_node = ["--verbs-on-loopback", "12345", "--pod-ip", "10.0.0.5", "--host-ip", "10.0.0.5"];
    check(
        &[&["scheduler"], &of_node[..]].concat(),
        2,
        &["hostNetwork", "10.0.0.5", "--listen with certificates"],
    );
    // Without the addresses nothing shows that the loopback interface is the pod's own.
    for known in [&[][..], &["--pod-ip", "10.1.0.5"], &["--host-ip", "10.0.0.5"]] {
        check(
            &[&["scheduler", "--verbs-on-loopback", "12345"], known].concat(),
            2,
            &["set the environment variables POD_IP and HOST_IP", "deploy/scheduler-second"],
        );
    }
    let table = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(table.path(), "{").unwrap();
    let table = table.path().to_str().unwrap();
    check(&["scheduler", "--static-table", table], 2, &["--static-table", table, "EOF while parsing"]);
    let simulate = |arguments: &[&str], words: &[&str]| {
        check(&[&["simulate", "cluster"], arguments].concat(), 2, words);
    };
    simulate(&["--workload", "alike"], &["unknown workload \"alike\"; choose among alike-10, "]);
    simulate(&["--workload", "openb-default"], &["write --traces FOLDER with the openb trace"]);
    simulate(&["--workload", "mixed", "--node-count", "0"], &["write a number from 1 to 10000"]);
    simulate(&["--workload", "mixed", "--fill", "2"], &["cannot be used with"]);
    check(&["topolgy"], 2, &["'topology'"]);
}

#[test]
fn a_mistake_in_extra_flags_names_the_variable() {
    let tip = "tip: the environment variable EXTRA_FLAGS adds these flags: ";
    let error = |extra: &str, arguments: &[&str]| {
        let output = command(arguments).env("EXTRA_FLAGS", extra).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for daemon in ["agent", "scheduler"] {
        let text = error("--v=4 --bogus", &[daemon]);
        assert!(text.contains("unexpected argument '--bogus' found"), "{text}");
        assert!(text.contains(&format!("{tip}--v=4 --bogus\n")), "{text}");
        // A mistake of the command line itself does not blame the variable.
        let text = error("--v=4", &[daemon, "--bogus"]);
        assert!(text.contains("unexpected argument '--bogus' found") && !text.contains(tip), "{text}");
    }
    let text = error("--memory-unit=MiB", &["agent"]);
    assert!(text.contains("--node-name <NAME>") && !text.contains(tip), "{text}");
    let text = error("--policy bogus", &["scheduler"]);
    assert!(text.contains("invalid value 'bogus' for '--policy") && text.contains(tip), "{text}");
    // Tips of the parser stay.
    let text = error("--polic=simple", &["scheduler"]);
    assert!(text.contains("tip: a similar argument exists: '--policy'") && text.contains(tip), "{text}");
    // Other commands do not read the variable.
    assert!(!error("--bogus", &["place"]).contains(tip));
}

#[test]
fn a_command_line_of_an_original_extender_says_which_flag_is_missing() {
    for words in [&["-policy", "best_effort"][..], &["-policy", "simple", "--v=5"]] {
        let remedy = ["--certificates-in kube-system", "gputopology", "--insecure-listen :PORT"];
        check(&[&["scheduler"], words].concat(), 2, &remedy);
    }
}

/// Returns a kubeconfig of an API server that does not exist.
pub(super) fn kubeconfig_without_server() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let server = "{clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], contexts: [{name: c, context: \
                  {cluster: c, user: ''}}], current-context: c}";
    std::fs::write(file.path(), server).unwrap();
    file
}

#[test]
fn a_port_in_use_is_reported_with_the_flag_for_another() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let kubeconfig = kubeconfig_without_server();
    let kubeconfig = kubeconfig.path().to_str().unwrap();
    let grants = tempfile::tempdir().unwrap();
    let (gpus, grants) = (["--gpus", "simulated:dgx1.txt"], grants.path().to_str().unwrap());
    let agent = ["agent", "--node-name", "n", "--grants", grants, "--log", "off", "--kubeconfig", kubeconfig];
    let scheduler =
        ["scheduler", "--kubeconfig", kubeconfig, "--dashboard-listen", "off", "--health-listen", "off"];
    for (command, flag) in [
        (&scheduler[..], "--insecure-listen"),
        (&[&["metrics"][..], &gpus].concat(), "--listen"),
        (&[&agent[..], &gpus].concat(), "--listen"),
    ] {
        check(
            &[command, &[flag, &address]].concat(),
            2,
            &[&format!("error: cannot listen on {address} ({flag} names another address)"), "in use"],
        );
    }
}

#[test]
fn a_file_that_is_no_list_of_objects_says_how_to_write_one() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pod.json");
    for content in ["nothing", r#"{"kind":"Pod"}"#] {
        std::fs::write(&file, content).unwrap();
        check(&["migrate", "check", file.to_str().unwrap()], 2, &["kubectl get nodes,pods -A -o json"]);
    }
}
