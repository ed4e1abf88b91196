//! Compares the output with every documented sample byte for byte, and with further golden files.

use serde_json::json;

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{A10, H200, T4, TestGpu, grouped, node, old_share_node, pairs, pod, share, shared};

/// Returns gputopology's documented node, with the links that its plugin wrote.
fn documented_topology() -> Stage {
    let stage = Stage::new();
    let links: serde_json::Map<String, serde_json::Value> =
        pairs(8).map(|(a, b)| (format!("GPU_PHB_{a}_{b}"), "Host PCI bridge".into())).collect();
    stage.node(&json!({
        "metadata": { "name": "cn-huhehaote.i-hp32to8ln1xdug4rk401", "annotations": {
            "GPU_TOPOLOGY": serde_json::to_string(&links).unwrap(), "NODE_TYPE": "ecs.gn5-c8g1.14xlarge" } },
        "status": { "capacity": { "aliyun.com/gpu": "8" }, "allocatable": { "aliyun.com/gpu": "8" } },
    }));
    stage.scheduler(&json!({ "tessera.dev/policy": "static" }));
    stage
}

#[test]
fn matches_the_documented_topology() {
    let stage = documented_topology();
    stage.golden("documented-gpu.txt", GPU, &[]);
    stage.golden("documented-gpu-details.txt", GPU, &["-d"]);
    stage.golden("documented-gpu-details.txt", GPU, &["cn-huhehaote.i-hp32to8ln1xdug4rk401", "-d"]);
}

#[test]
fn matches_the_documented_shares_of_two_nodes() {
    let nodes = [
        old_share_node("192.168.68.4", "192.168.68.4", 8, 80),
        old_share_node("192.168.3.4", "192.168.3.4", 8, 88),
    ];
    let held = [
        ("192.168.3.4", vec![(0, 4), (1, 6), (2, 4), (2, 6)]),
        ("192.168.68.4", vec![(0, 4), (2, 10), (3, 9), (5, 10), (6, 6), (7, 3), (7, 3)]),
    ];
    let pods: Vec<_> = held
        .iter()
        .flat_map(|(node, held)| {
            held.iter().enumerate().map(move |(place, (gpu, units))| {
                shared("default", &format!("p-{node}-{place}"), node, *units, *gpu)
            })
        })
        .collect();
    Stage::of(&nodes, &pods).golden("documented-gpushare.txt", SHARE, &[]);
}

#[test]
fn matches_the_published_summary_and_details() {
    let (first, second) = ("cn-shanghai.i-uf61h64dz1tmlob9hmtb", "cn-shanghai.i-uf61h64dz1tmlob9hmtc");
    let nodes = [old_share_node(first, "192.168.0.71", 1, 15), old_share_node(second, "192.168.0.70", 1, 15)];
    let pods = [
        shared("default", "binpack-1-0", first, 3, 0),
        shared("default", "binpack-1-1", first, 3, 0),
        shared("default", "binpack-1-2", second, 3, 0),
    ];
    Stage::of(&nodes, &pods).golden("published-gpushare.txt", SHARE, &[]);
    let pods = [
        shared("default", "binpack-1-0", "node-a", 3, 0),
        shared("default", "binpack-1-1", "node-a", 3, 0),
        shared("team-a", "big-0", "node-a", 10, 1),
    ];
    let stage = Stage::of(&[old_share_node("node-a", "192.168.0.71", 2, 30)], &pods);
    stage.golden("published-gpushare-details.txt", SHARE, &["-d"]);
    let pods = [
        shared("default", "tf-jupyter-954ffbbf8-lztc9", "node5", 3, 0),
        shared("default", "tf-jupyter2-69b6f97566-j4f4w", "node5", 3, 0),
    ];
    let stage = Stage::of(&[old_share_node("node5", "10.202.115.1", 1, 7)], &[]);
    stage.golden("published-gpushare-details-none.txt", SHARE, &["-d"]);
    pods.iter().for_each(|pod| stage.pod(pod));
    stage.golden("published-gpushare-details-two.txt", SHARE, &["-d"]);
}

#[test]
fn reports_a_cluster_without_gpus() {
    let stage = Stage::of(
        &[json!({ "metadata": { "name": "cpu-only" }, "status": { "capacity": { "cpu": "4" } } })],
        &[],
    );
    stage.golden("empty-gpushare.txt", SHARE, &[]);
    stage.golden("empty-gpushare-details.txt", SHARE, &["-d"]);
    let output = stage.run(GPU, &[]);
    assert!(output.status.success() && output.stdout.is_empty());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "No node offers GPU. A node offers it when a device plugin or an agent runs on it.\n");
    assert_eq!(stage.text(GPU, &["-o", "name"]), "");
    // Pods wait for GPUs that no node offers.
    stage.pod(&pod("team", "waits", "", &[("nvidia.com/gpu", 1)], json!({})));
    let output = stage.command(GPU).arg("overview").env("COLUMNS", "120").output().unwrap();
    let (shown, warned) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(shown.starts_with("1 pod waits for GPUs:\n  team/waits "), "{shown:?}");
    let unreported = "kube-scheduler has not reported on the pod yet; its schedulerName is default-scheduler";
    assert!(shown.contains(unreported), "{shown:?}");
    assert_eq!(warned, said);
}

/// Returns a cluster with one, sixteen, mixed and unhealthy GPUs, with starting and ending pods,
/// and with long and Chinese names.
fn varied() -> Stage {
    let broken = TestGpu { unhealthy: true, ..T4 };
    let mut chinese = node("zh", "10.0.0.5", "GiB", &[TestGpu { model: "英伟达显卡", ..T4 }]);
    chinese["metadata"]["annotations"]["NODE_TYPE"] = "训练机型".into();
    let mut cordoned = node("mixed", "10.0.0.3", "GiB", &[T4, A10, broken]);
    cordoned["spec"] = json!({ "unschedulable": true });
    let long = "a-node-whose-name-is-as-long-as-the-names-that-some-clouds-give-to-their-machines-in-some-regions.example";
    let nodes = [
        node("one", "10.0.0.1", "GiB", &[T4]),
        node("sixteen", "10.0.0.2", "GiB", &[T4; 16]),
        cordoned,
        node(long, "2001:db8::7", "GiB", &[T4, T4]),
        chinese,
    ];
    let mut ending = share("ending", "sixteen", 4, 50, 8);
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    let mut ended = shared("default", "ended", "one", 15, 0);
    ended["status"]["phase"] = "Succeeded".into();
    let pods = [
        grouped("ring", "sixteen", &[0, 1, 2, 3]),
        share("thirty", "sixteen", 5, 30, 16),
        share("twenty", "sixteen", 5, 20, 8),
        ending,
        ended,
        shared("default", "spread-over-gpus", "mixed", 10, 0),
        pod("default", "nobody-told", "mixed", &[("aliyun.com/gpu-mem", 4)], json!({})),
        pod(
            "default",
            "two-gpus",
            "mixed",
            &[("aliyun.com/gpu-mem", 8)],
            json!({ "scheduler.framework.gpushare.allocation": r#"{"0":{"0":2,"1":6}}"# }),
        ),
        pod("team", "waits", "", &[("aliyun.com/gpu-mem", 40)], json!({})),
        pod("default", "no-gpu", "one", &[("cpu", 2)], json!({})),
    ];
    let stage = Stage::new();
    nodes.iter().for_each(|node| stage.node(node));
    for pod in &pods {
        // The API server sets the deletionTimestamp itself.
        let mut fresh = pod.clone();
        let ends = fresh["metadata"].as_object_mut().unwrap().remove("deletionTimestamp").is_some();
        stage.pod(&fresh);
        if ends {
            stage.end_gently(
                pod["metadata"]["namespace"].as_str().unwrap(),
                pod["metadata"]["name"].as_str().unwrap(),
            );
        }
    }
    stage
}

#[test]
fn matches_the_golden_files_of_a_varied_cluster() {
    let stage = varied();
    stage.golden("varied-gpu.txt", GPU, &[]);
    stage.golden("varied-gpu-details.txt", GPU, &["-d"]);
    stage.golden("varied-gpu-wide.txt", GPU, &["-o", "wide"]);
    stage.golden("varied-gpushare.txt", SHARE, &[]);
    stage.golden("varied-gpushare-details.txt", SHARE, &["-d"]);
    stage.golden("varied-gpushare-wide.txt", SHARE, &["-o", "wide"]);
    stage.golden("varied-gpushare-one.txt", SHARE, &["one"]);
    for columns in ["80", "200"] {
        for (name, wide) in [("overview", &[][..]), ("overview-wide", &["-o", "wide"])] {
            let mut command = stage.command(GPU);
            let output =
                command.args([&["overview"], wide].concat()).env("COLUMNS", columns).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= columns.parse().unwrap(), "{widest} columns of {columns}:\n{text}");
            // The age of the waiting pod depends on when the test runs.
            let is_aged = |line: &&str| !line.contains("team/waits");
            let ageless: String = text.lines().filter(is_aged).map(|line| format!("{line}\n")).collect();
            assert_eq!(text.lines().count(), ageless.lines().count() + 1, "{text}");
            crate::stage::golden(&format!("varied-{name}-{columns}.txt"), &ageless);
        }
    }
    let nothing = stage.run(GPU, &["-l", "no=such"]);
    assert_eq!(String::from_utf8(nothing.stderr).unwrap(), "No node matches no=such.\n");
    stage.golden("varied-tree.txt", GPU, &["tree", "sixteen", "--no-agents"]);
    stage.golden("varied-tree-wide.txt", GPU, &["tree", "mixed", "--no-agents", "-o", "wide"]);
}

#[test]
fn uses_the_memory_unit_of_the_node() {
    let stage = Stage::of(
        &[node("h200", "10.0.0.1", "GiB", &[H200, H200])],
        &[shared("default", "p", "h200", 70, 1)],
    );
    stage.golden("unit-gib.txt", SHARE, &[]);
    stage.node(&node("small", "10.0.0.2", "256MiB", &[T4]));
    stage.golden("unit-mixed.txt", SHARE, &[]);
    let stage =
        Stage::of(&[node("blocks", "10.0.0.2", "256MiB", &[T4])], &[shared("default", "p", "blocks", 6, 0)]);
    stage.golden("unit-blocks.txt", SHARE, &[]);
    let stage = Stage::of(&[old_share_node("old", "10.0.0.3", 1, 7606)], &[]);
    stage.golden("unit-old-mib.txt", SHARE, &["--memory-unit", "MiB"]);
    stage.golden("unit-old-mib.txt", SHARE, &[]);
}

/// A kubelet that lost its checkpoint removes the number of GPUs, and the memory stays.
#[test]
fn keeps_nodes_whose_number_of_gpus_is_unknown() {
    let mut countless = old_share_node("countless", "10.0.0.4", 2, 22);
    for kind in ["capacity", "allocatable"] {
        countless["status"][kind].as_object_mut().unwrap().remove("aliyun.com/gpu-count");
    }
    let stage = Stage::of(
        &[countless, old_share_node("known", "10.0.0.5", 2, 22)],
        &[shared("default", "p", "countless", 4, 1), shared("default", "q", "known", 6, 1)],
    );
    stage.golden("countless-gpushare.txt", SHARE, &[]);
    stage.golden("countless-gpushare-details.txt", SHARE, &["-d"]);
}

/// Agents withdraw the devices of all other dialects of a GPU that is held, so a full node has a capacity and nothing
/// that is allocatable. gpushare's plugin withdraws nothing: with its amounts, every view is the same.
#[test]
fn full_nodes_stay_in_every_view() {
    let nodes = ["node-00", "node-01", "node-02"].map(|name| node(name, "10.0.0.1", "GiB", &[T4; 8]));
    let all: Vec<u64> = (0..8).collect();
    let pods = [
        grouped("ring-0", "node-00", &all),
        grouped("ring-1", "node-01", &all),
        shared("team", "notes", "node-02", 12, 0),
        pod("team", "waits", "", &[("aliyun.com/gpu-mem", 8)], json!({})),
    ];
    let mut withdrawn = nodes.clone();
    for node in &mut withdrawn[..2] {
        for resource in
            ["nvidia.com/gpu", "aliyun.com/gpu-mem", "tencent.com/vcuda-core", "tencent.com/vcuda-memory"]
        {
            node["status"]["allocatable"][resource] = "0".into();
        }
    }
    let (original, stage) = (Stage::of(&nodes, &pods), Stage::of(&withdrawn, &pods));
    stage.golden("full-gpushare.txt", SHARE, &[]);
    stage.golden("full-gpushare-details.txt", SHARE, &["-d"]);
    for arguments in [&[][..], &["-d"], &["-o", "wide"], &["node-00"], &["-o", "yaml"]] {
        assert_eq!(stage.text(SHARE, arguments), original.text(SHARE, arguments), "{arguments:?}");
    }
    for arguments in [&["explain", "team/waits"][..], &["what-if", "aliyun.com/gpu-mem=8"], &["-o", "json"]] {
        assert_eq!(stage.text(GPU, arguments), original.text(GPU, arguments), "{arguments:?}");
    }
    let text = stage.text(GPU, &["explain", "team/waits"]);
    assert!(text.contains("\n2      no GPU with 8192 MiB left\n"), "{text}");
}

/// A kubelet whose device plugin has ended keeps the capacity for some minutes. A free GPU is of no use there.
#[test]
fn nodes_that_offer_nothing_now_say_so() {
    let mut ended = node("ended", "10.0.0.1", "GiB", &[T4; 2]);
    ended["status"]["allocatable"]["aliyun.com/gpu-mem"] = "0".into();
    let mut removed = node("removed", "10.0.0.1", "GiB", &[T4; 2]);
    for kind in ["capacity", "allocatable"] {
        removed["status"][kind]["aliyun.com/gpu-mem"] = "0".into();
    }
    let stage =
        Stage::of(&[ended, removed], &[pod("team", "waits", "", &[("aliyun.com/gpu-mem", 8)], json!({}))]);
    let text = stage.text(GPU, &["explain", "team/waits", "-o", "wide"]);
    assert!(text.contains("\nended: node offers none of this GPU resource at the moment\n"), "{text}");
    assert!(text.contains("\nremoved: node does not offer this kind of GPU resource\n"), "{text}");
}

/// Compares the golden files with the original documents, if those lie beside the checkout.
#[test]
fn golden_files_match_the_original_documents() {
    let beside = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/sources");
    let Ok(files) = std::fs::read_dir(&beside) else {
        println!("{} is missing: the golden files are not compared with the documents", beside.display());
        return;
    };
    let documents: Vec<String> =
        files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok()).collect();
    for name in ["documented-gpu.txt", "documented-gpu-details.txt", "documented-gpushare.txt"] {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let golden = std::fs::read_to_string(golden).unwrap();
        assert!(documents.iter().any(|text| text.contains(&golden)), "{name} is in none of the documents");
    }
}

#[test]
fn shows_mig_instances() {
    let mut mig = node("mig", "10.0.0.1", "GiB", &[H200]);
    mig["status"]["allocatable"]["nvidia.com/mig-1g.18gb"] = "2".into();
    mig["status"]["allocatable"]["nvidia.com/mig-2g.35gb"] = "0".into();
    let pods = [pod("team-a", "small", "mig", &[("nvidia.com/mig-1g.18gb", 1)], json!({}))];
    let stage = Stage::of(&[mig], &pods);
    let details = stage.text(GPU, &["-d"]);
    assert!(
        details.contains("\nmig instances: 1 of 2 nvidia.com/mig-1g.18gb used team-a/small\n"),
        "{details}"
    );
    assert!(!details.contains("2g.35gb"), "{details}");
    let overview = stage.text(GPU, &["overview"]);
    assert!(overview.contains("\n  1 of 2 nvidia.com/mig-1g.18gb held\n"), "{overview}");
    let json: serde_json::Value = serde_json::from_str(&stage.text(GPU, &["-o", "json"])).unwrap();
    let expected = json!({ "nvidia.com/mig-1g.18gb": { "offered": 2, "held": 1, "pods": ["team-a/small"] } });
    assert_eq!(json["nodes"][0]["instances"], expected);
}
