//! Every view says the same with and without `--endpoint`.

use serde_json::json;
use tessera_scheduler::state::{DefaultPolicy, SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_wire::tessera::rules::{self, Rules};
use tessera_wire::tessera::static_table;

use crate::explain::{serve, with_forecast};
use crate::stage::{GPU, Stage};
use crate::states::{H200, T4, grouped, node, pod};

/// Returns the state of a scheduler that watches this cluster and has made its forecast.
fn scheduler(stage: &Stage) -> State {
    with_forecast(watching(stage, SchedulerSettings::default()))
}

/// Returns the state of a scheduler with these settings that watches this cluster.
fn watching(stage: &Stage, settings: SchedulerSettings) -> State {
    let mut state = State::new(settings);
    for node in stage.server.list("/api/v1/nodes") {
        state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node).unwrap())));
    }
    for pod in stage.server.list("/api/v1/pods") {
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(pod).unwrap())));
    }
    state
}

/// Runs a command with both sources and returns its output, which must be the same.
fn both(stage: &Stage, url: &str, arguments: &[&str]) -> String {
    let asked: Vec<&str> = arguments.iter().chain(&["--endpoint", url]).copied().collect();
    let (api, scheduler) = (stage.text(GPU, arguments), stage.text(GPU, &asked));
    assert_eq!(api, scheduler, "{arguments:?}");
    api
}

/// The fullest node is the best one by policy `binpack`, and equal nodes come in the order in which people count.
#[test]
fn nodes_have_the_same_order() {
    let nodes =
        ["node-1", "node-2", "node-10", "node-20"].map(|name| node(name, "10.0.0.1", "GiB", &[T4; 4]));
    let placed = pod("team", "job", "node-10", &[("aliyun.com/gpu-mem", 4)], json!({}));
    let stage = Stage::of(&nodes, &[placed]);
    stage.scheduler(&json!(rules::print(&SchedulerSettings::default().rules())));
    let binpack = json!({ "tessera.dev/policy": "binpack" });
    stage.pod(&pod("team", "waits", "", &[("nvidia.com/gpu", 1), ("cpu", 1)], binpack));
    let url = serve(&stage, scheduler(&stage));
    let what_if = ["what-if", "nvidia.com/gpu=1", "cpu=1", "-a", "tessera.dev/policy=binpack"];
    for request in [&["explain", "team/waits"][..], &what_if] {
        let name: Vec<&str> = request.iter().chain(&["-o", "name"]).copied().collect();
        let names = both(&stage, &url, &name);
        assert_eq!(names, "node/node-10\nnode/node-1\nnode/node-2\nnode/node-20\n", "{request:?}");
        let all: Vec<&str> = request.iter().chain(&["-o", "json"]).copied().collect();
        both(&stage, &url, &all);
        both(&stage, &url, request);
    }
    // No node has so many GPUs, so the smaller request and the nearest nodes come in this order, too.
    let too_many = ["what-if", "nvidia.com/gpu=5", "-o", "wide"];
    let asked: Vec<&str> = too_many.iter().chain(&["--endpoint", &url]).copied().collect();
    let [api, scheduler] =
        [&too_many[..], &asked].map(|arguments| String::from_utf8(stage.run(GPU, arguments).stdout).unwrap());
    assert_eq!(api, scheduler);
    assert!(api.find("\nnode-2:") < api.find("\nnode-10:"), "{api}");
}

/// A scheduler that has run for long expects pods like those that have ended, and the plugin does not know them. It
/// names the nodes in their own order and says so, instead of another order than the scheduler's.
#[test]
fn without_the_schedulers_forecast_no_node_is_called_the_best() {
    let mut nodes: Vec<_> =
        ["node-1", "node-2", "node-10"].map(|name| node(name, "10.0.0.1", "GiB", &[T4; 4])).into();
    nodes[2]["status"]["allocatable"]["cpu"] = "4".into();
    let stage = Stage::of(&nodes, &[pod("team", "job", "node-2", &[("aliyun.com/gpu-mem", 4)], json!({}))]);
    stage.scheduler(&json!(rules::print(&SchedulerSettings::default().rules())));
    stage.pod(&pod("team", "waits", "", &[("nvidia.com/gpu", 1), ("cpu", 1)], json!({})));
    let mut state = scheduler(&stage);
    for number in 0..500 {
        let mut ended = pod("team", &format!("ended-{number}"), "", &[("nvidia.com/gpu", 1)], json!({}));
        ended["metadata"]["uid"] = format!("ended-{number}").into();
        let ended: tessera_wire::foreign::objects::Pod = serde_json::from_value(ended).unwrap();
        state.handle(StateEvent::Pod(WatchEvent::Set(ended.clone())));
        state.handle(StateEvent::Pod(WatchEvent::Gone(ended)));
    }
    let url = serve(&stage, with_forecast(state));
    for request in [&["explain", "team/waits"][..], &["what-if", "nvidia.com/gpu=1", "cpu=1"]] {
        let asked = |more: &[&str]| stage.text(GPU, &[request, more].concat());
        assert_eq!(asked(&["-o", "name"]), "node/node-1\nnode/node-2\nnode/node-10\n", "{request:?}");
        let best = asked(&["-o", "name", "--endpoint", &url]);
        assert!(best.starts_with("node/node-2\n"), "{request:?}: {best}");
        let (api, scheduler) = (asked(&[]), asked(&["--endpoint", &url]));
        let by_name =
            "nodes by name; --endpoint URL shows which ones and which of their GPUs the scheduler prefers\n";
        assert!(api.contains(by_name), "{api}");
        assert!(scheduler.contains("best node first\n") && !scheduler.contains(by_name), "{scheduler}");
        assert!(!asked(&["-o", "json"]).contains("\"rank\""));
        assert!(asked(&["-o", "json", "--endpoint", &url]).contains("\"rank\": 1"));
    }
    // Other policies learn nothing, and a single node is the best one by every policy.
    let binpack = ["what-if", "nvidia.com/gpu=1", "-a", "tessera.dev/policy=binpack"];
    assert!(both(&stage, &url, &binpack).contains("best node first\n"));
    both(
        &stage,
        &url,
        &["what-if", "aliyun.com/gpu-mem=14", "-a", "tessera.dev/use-gpu-uuids=GPU-node-1-0", "-o", "json"],
    );
}

/// A scheduler with `--static-strict` refuses free GPUs that its table does not list. The plugin has the shipped tables
/// too; of a table in a file it says that only the scheduler knows it.
#[test]
fn a_strict_table_is_known_or_named() {
    let mut typed = node("node-1", "10.0.0.1", "GiB", &[T4; 4]);
    typed["metadata"]["annotations"]["NODE_TYPE"] = "hgx-4".into();
    let settings = || SchedulerSettings {
        policy: DefaultPolicy("static".parse().unwrap()),
        static_strict: true,
        ..SchedulerSettings::default()
    };
    let cluster = |rules: Rules| {
        let stage = Stage::of(&[typed.clone()], &[grouped("held", "node-1", &[0])]);
        stage.scheduler(&json!(rules::print(&rules)));
        let state = watching(&stage, settings());
        (stage, state)
    };
    let (two, three) = (["what-if", "nvidia.com/gpu=2"], ["what-if", "nvidia.com/gpu=3"]);

    let (stage, state) = cluster(settings().rules());
    let url = serve(&stage, state);
    assert!(both(&stage, &url, &two).contains("fits on 1 of 1 node (policy static)\n"));
    let both_refuse = [&three[..], &[&three[..], &["--endpoint", &url]].concat()];
    for request in both_refuse {
        let answer = stage.run(GPU, request);
        let said = String::from_utf8(answer.stdout).unwrap();
        assert!(said.contains("no free set of 3 GPUs in the static table"), "{request:?}: {said}");
    }

    let (stage, mut state) = cluster(Rules { has_shipped_table: false, ..settings().rules() });
    let own = static_table::parse(r#"{"hgx-4": {"2": [[0, 1]]}}"#).unwrap();
    state.handle(StateEvent::Table(own));
    let url = serve(&stage, state);
    let line = "only the scheduler knows the sets of GPUs in its static table; ask it with --endpoint URL\n";
    let text = String::from_utf8(stage.run(GPU, &two).stdout).unwrap();
    assert!(text.contains("the GPUs of 1 of 1 node would do (policy static)\n"), "{text}");
    assert!(text.contains(line) && !text.contains("like this would fit now"), "{text}");
    let asked = stage.run(GPU, &[&two[..], &["--endpoint", &url]].concat());
    let asked = String::from_utf8(asked.stdout).unwrap();
    assert!(asked.contains("no free set of 2 GPUs in the static table") && !asked.contains(line), "{asked}");
    // Other policies do not depend on the table.
    let other = stage.text(GPU, &["what-if", "nvidia.com/gpu=2", "-a", "tessera.dev/policy=binpack"]);
    assert!(other.contains("fits on 1 of 1 node (policy binpack)\n"), "{other}");
}

/// MIG instances and reservations are shown by both sources, and pods with instances say where they run and why they
/// wait.
#[test]
fn mig_instances_and_reservations_are_shown() {
    let mut mig = node("mig", "10.0.0.4", "GiB", &[H200, H200]);
    mig["status"]["allocatable"]["nvidia.com/mig-1g.18gb"] = "2".into();
    let reservation = json!([{ "name": "maintenance", "owner": "jane", "until": "2999-01-02T03:04:05Z",
        "gpus": [{ "uuid": "GPU-mig-1" }] }]);
    mig["metadata"]["annotations"]["tessera.dev/reservations"] = reservation.to_string().into();
    let instances = [("nvidia.com/mig-1g.18gb", 1)];
    let pods = ["a", "b"].map(|name| pod("team", name, "mig", &instances, json!({})));
    let stage = Stage::of(&[mig, node("t4", "10.0.0.3", "GiB", &[T4])], &pods);
    stage.scheduler(&json!(rules::print(&SchedulerSettings::default().rules())));
    let mut waits = pod("team", "waits", "", &instances, json!({}));
    waits["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient nvidia.com/mig-1g.18gb." }]);
    stage.pod(&waits);
    let url = serve(&stage, scheduler(&stage));
    let details = both(&stage, &url, &["-d"]);
    assert!(
        details.contains("mig instances: 2 of 2 nvidia.com/mig-1g.18gb used team/a team/b\n"),
        "{details}"
    );
    assert!(details.contains("1 GPU reserved for "), "{details}");
    both(&stage, &url, &["-d", "mig"]);
    for form in [&["overview", "mig"][..], &["overview", "mig", "-o", "wide"]] {
        let [api, scheduler] = [&[][..], &["--endpoint", &url]].map(|endpoint| {
            let asked: Vec<&str> = form.iter().chain(endpoint).copied().collect();
            let text = stage.text(GPU, &asked);
            // The ages below the heading depend on the time of the call, and the API server lists the pods of one node.
            text.split_once("\n\n").unwrap().0.to_owned()
        });
        assert_eq!(api, scheduler, "{form:?}");
        assert!(api.contains("  2 of 2 nvidia.com/mig-1g.18gb held\n"), "{api}");
        assert!(api.contains("  1 GPU reserved for "), "{api}");
        assert!(!form.contains(&"wide") || api.contains("  GPU1 reserved for maintenance (jane)"), "{api}");
    }
    both(&stage, &url, &["-o", "wide"]);
    let tree = both(&stage, &url, &["tree", "mig", "--no-agents", "-o", "wide"]);
    assert!(
        tree.contains("GPU1 0% and 0 GiB of 140 GiB free  [reserved for maintenance (jane)]\n"),
        "{tree}"
    );
    let text = both(&stage, &url, &["explain", "team/waits"]);
    let expected = "\
pod team/waits waits
kube-scheduler: 0/2 nodes are available: 2 Insufficient nvidia.com/mig-1g.18gb.
requests nvidia.com/mig-1g.18gb=1
the GPUs of 0 of 2 nodes would do (policy tessera)

NODES  REASON
1      node has 0 of 2 nvidia.com/mig-1g.18gb left, and the pod requests 1
1      node offers 0 of nvidia.com/mig-1g.18gb, and the pod requests 1
";
    assert_eq!(text, expected);
    let text = both(&stage, &url, &["explain", "team/a"]);
    let expected = "\
pod team/a is placed on node mig
  1 nvidia.com/mig-1g.18gb
chosen because: kube-scheduler chose the node; it counts these resources itself
";
    assert_eq!(text, expected);
}
