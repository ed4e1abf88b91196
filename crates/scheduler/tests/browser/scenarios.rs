//! The scenarios: what users do with the pages.

mod claims;
mod lists;
mod reasons;

use std::pin::Pin;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tessera_sim::kube_scheduler::REPORTS;
use tessera_sim::reviews::{KnownToken, ReviewServer};
use tessera_wire::tessera::page_rights;

use self::claims::a_pod_with_the_gpus_of_a_claim_has_a_page;
use self::lists::{
    bars_and_tiles_are_aligned, lists_are_sorted_and_filtered, squares_of_the_map_have_labels,
    what_if_is_stored_in_the_address,
};
use self::reasons::every_reason_is_translated;
use crate::cluster::{Cluster, H100, Kind, Replica, T4, V100, agent, memory, node, pod, share, whole};
use crate::pictures::sample;
use crate::webdriver::{Browser, request};

type Outcome<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        /// All scenarios by name.
        pub(crate) const ALL: &[(&str, for<'a> fn(&'a Browser) -> Outcome<'a>)] =
            &[$((stringify!($name), |browser| Box::pin($name(browser)))),*];
    };
}

scenarios![
    the_overview_shows_the_whole_cluster,
    a_new_pod_appears_without_a_reload,
    links_lead_from_the_list_to_a_node_and_a_pod,
    a_waiting_pod_is_explained,
    no_page_says_that_a_waiting_pod_fits,
    nodes_without_new_pods_are_marked,
    a_pod_of_another_scheduler_says_so,
    a_waiting_gang_is_explained,
    instances_and_reservations_are_shown,
    the_four_questions_are_answered,
    a_placed_pod_says_why,
    a_pod_with_the_gpus_of_a_claim_has_a_page,
    waste_is_sorted_and_filtered_by_the_address,
    what_if_explains_and_changes_nothing,
    what_if_is_stored_in_the_address,
    lists_are_sorted_and_filtered,
    squares_of_the_map_have_labels,
    bars_and_tiles_are_aligned,
    a_new_leader_does_not_know_idle_pods,
    filters_are_stored_in_the_address,
    both_themes_apply,
    both_languages_apply,
    every_reason_is_translated,
    the_keyboard_reaches_everything,
    pages_pass_the_accessibility_audit,
    pages_fit_narrow_screens,
    markup_in_names_is_shown_as_text,
    foreign_scripts_and_styles_are_blocked,
    unmeasured_usage_is_not_shown_as_zero,
    a_lost_connection_is_restored,
    a_follower_names_the_leader,
    a_token_logs_in_and_out,
    a_thousand_nodes_need_few_elements,
];

const TAB: char = '\u{E004}';
const ENTER: char = '\u{E007}';

const PAGES: [&str; 10] = [
    "#/overview",
    "#/nodes",
    "#/node/v100-01",
    "#/pods",
    "#/pod/research/llama-finetune-0",
    "#/pod/inference/embedder-0",
    "#/quota",
    "#/waste",
    "#/what-if",
    "#/decisions",
];

async fn small() -> Result<Cluster> {
    Cluster::start([node("h1", H100), node("v1", V100), node("t1", T4), node("t2", T4)]).await
}

/// Opens a page and waits until it has loaded.
async fn visit(browser: &Browser, cluster: &Cluster, page: &str) -> Result<()> {
    browser.open(&cluster.replica.url(page)).await?;
    browser.until("document.querySelector('main h1')").await
}

async fn the_overview_shows_the_whole_cluster(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    visit(browser, &cluster, "").await?;
    browser.until_text("16 nodes, 104 GPUs").await?;
    for text in [
        "H100 80GB HBM3",
        "Tesla V100-SXM2-32GB",
        "research",
        "1 unhealthy, 0 overbooked",
        "Latest decisions",
        "bound to",
    ] {
        browser.until_text(text).await?;
    }
    browser
        .until("document.querySelector('canvas').getAttribute('aria-label') === 'Map of 16 nodes'")
        .await?;
    // A square of the map leads to the page of its node.
    browser.eval("document.querySelector('canvas').focus()").await?;
    browser.press(&['\u{E014}', '\u{E014}', ENTER]).await?;
    browser.until("location.hash.startsWith('#/node/')").await
}

async fn a_new_pod_appears_without_a_reload(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "").await?;
    let waiting = "[...document.querySelectorAll('.figure-card')].find(card => card.innerText.startsWith('Pods waiting'))?.querySelector('.value').innerText";
    browser.until(&format!("{waiting} === '0'")).await?;
    let made = cluster.make(&pod("team", "late", whole(8)))?;
    browser.until(&format!("{waiting} === '1'")).await?;
    cluster.schedule(&made).await?.context("there is room")?;
    browser.until(&format!("{waiting} === '0'")).await?;
    browser.until_text("team/late bound to h1, GPU 0, 1, 2, 3, 4, 5, 6, 7").await?;
    // The only node of its model is no longer empty, so that cell of the table has no shade.
    let fields = "[...document.querySelectorAll('.grade.none')]";
    browser
        .until(&format!("{fields}.length === 15 && {fields}.every(field => field.style.length === 0)"))
        .await?;
    // The list of nodes shows the change too, although it reloads only visible nodes.
    visit(browser, &cluster, "#/nodes").await?;
    browser.until("document.querySelectorAll('.tile.held').length === 8").await?;
    cluster.run(&pod("team", "part", share(50, 4_096))).await?.context("there is room")?;
    browser.until("document.querySelectorAll('.tile.held').length === 9").await?;
    cluster
        .api
        .delete("/api/v1/namespaces/team/pods/late")
        .map_err(|problem| anyhow::anyhow!("{problem}"))?;
    browser.until("document.querySelectorAll('.tile.held').length === 1").await
}

async fn links_lead_from_the_list_to_a_node_and_a_pod(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    cluster.run(&pod("team", "first", json!({"aliyun.com/gpu": "4", "cpu": "4"}))).await?;
    visit(browser, &cluster, "#/nodes").await?;
    browser.click("article.node[data-key=v1] .tile[href$='gpu=5']").await?;
    browser.until("document.querySelector('#gpu-5.chosen')").await?;
    browser.until("document.querySelectorAll('svg.graph .vertex').length === 8 && document.querySelectorAll('svg.graph line').length === 28").await?;
    let cell = "document.querySelectorAll('.matrix tbody tr')[0].children[4].innerText";
    ensure!(browser.eval(cell).await? == "NV2", "{}", browser.eval(cell).await?);
    browser.eval("history.back()").await?;
    browser.click("article.node[data-key=h1] h3 a").await?;
    browser.until_text("All GPUs reach each other through NVLink switches, 18 NVLinks each").await?;
    browser.click(".top nav a[data-page=pods]").await?;
    browser.click(".pod-row a").await?;
    browser.until("location.hash === '#/pod/team/first'").await?;
    for text in [
        "4 whole GPUs",
        "gputopology",
        "Granted",
        "Decisions about it",
        "GB/s of at most",
        "tessera.dev/grant",
    ] {
        browser.until_text(text).await?;
    }
    browser.click(".gpu h3 a").await?;
    browser.until("location.hash.startsWith('#/node/')").await
}

async fn a_waiting_pod_is_explained(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    for number in 0..4 {
        cluster.run(&pod("team", &format!("filler-{number}"), share(60, 4_096))).await?;
    }
    let waits = cluster.make(&pod("team", "waits", whole(9)))?;
    ensure!(cluster.schedule(&waits).await?.is_none(), "no node has nine GPUs");
    visit(browser, &cluster, "#/pods?state=waiting").await?;
    browser.until_text("1 pod").await?;
    browser.until("document.querySelector('.pod-row').innerText.includes('4 × too few GPUs')").await?;
    browser.click(".pod-row a").await?;
    for text in [
        "Why it waits",
        "The GPUs of 0 of 4 nodes would do.",
        "What stands in the way",
        "fewer than 9 GPUs",
        "Evictions would not help",
        "4 × too few GPUs",
    ] {
        browser.until_text(text).await?;
    }
    browser.click("details summary").await?;
    browser.until("document.querySelector('.gpu-reasons').innerText.includes('GPU 0')").await?;
    // Details that the user opened stay open while the page follows changes.
    cluster.run(&pod("team", "another", share(20, 1_024))).await?;
    browser.until_text("GPU 0").await?;
    browser.until("document.querySelector('details').open").await
}

/// Whatever keeps kube-scheduler from placing a pod: the report is shown, and no page says that the pod fits, also where
/// our own filter has found GPUs for it.
async fn no_page_says_that_a_waiting_pod_fits(browser: &Browser) -> Result<()> {
    let cluster = Cluster::start([node("free", T4)]).await?;
    for (place, (reason, message)) in REPORTS.iter().enumerate() {
        let made = cluster.make(&pod("team", &format!("p-{place}"), whole(1)))?;
        // Our filter passes the pod, and kube-scheduler refuses it for a reason of its own.
        let passed = cluster.post("/scheduler/filter", &json!({"Pod": made, "NodeNames": ["free"]})).await?;
        ensure!(passed["NodeNames"] == json!(["free"]), "there are free GPUs: {passed}");
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": reason, "message": message});
        let path = format!("/api/v1/namespaces/team/pods/p-{place}/status");
        let status = json!({"status": {"phase": "Pending", "conditions": [condition]}});
        cluster.api.patch(&path, &status).map_err(|problem| anyhow::anyhow!("{problem}"))?;
    }
    browser.size(1280, 2400).await?;
    let says_fits = async |page: &str| -> Result<()> {
        let found = browser
            .eval("document.querySelector('main').innerText.match(/[^\\n]*\\bfits?\\b[^\\n]*/i)")
            .await?;
        ensure!(found.is_null(), "{page}: the pod waits, and the page says {found}");
        Ok(())
    };
    visit(browser, &cluster, "#/pods").await?;
    let rows = "[...document.querySelectorAll('.pod-row')].map(row => row.innerText)";
    browser.until(&format!("{rows}.length === {}", REPORTS.len())).await?;
    for (_, message) in REPORTS {
        let message = json!(message);
        browser.until(&format!("{rows}.some(text => text.includes({message}))")).await?;
    }
    says_fits("#/pods").await?;
    visit(browser, &cluster, "#/overview").await?;
    browser.until("document.querySelector('.figure-card .value').innerText === '24'").await?;
    says_fits("#/overview").await?;
    for (place, (_, message)) in REPORTS.iter().enumerate() {
        let page = format!("#/pod/team/p-{place}");
        visit(browser, &cluster, &page).await?;
        let report = json!(format!("kube-scheduler: {message}"));
        browser
            .until(&format!("document.querySelector('.explanation p')?.innerText.startsWith({report})"))
            .await
            .with_context(|| page.clone())?;
        // The decision of our filter is listed, in words that do not say that the pod fits.
        browser.until_text("GPUs found on 1 node").await?;
        says_fits(&page).await?;
    }
    Ok(())
}

/// A replica that has just begun to lead cannot know which pods have been idle for ten minutes.
async fn a_new_leader_does_not_know_idle_pods(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    cluster.run(&pod("team", "p", whole(1))).await?.context("there is room")?;
    cluster.begin_observing(0.0);
    visit(browser, &cluster, "").await?;
    let figure = "document.querySelector('.figure-card[href*=\"waste?state=idle\"]')?.innerText.split('\\n')";
    browser.until(&format!("{figure}?.some(line => line.startsWith('Use is observed since'))")).await?;
    browser.until(&format!("{figure}.includes('–') && !{figure}.includes('0')")).await
}

/// How full, who holds what, why does my pod wait, and who wastes what they hold: the overview answers or leads to it.
async fn the_four_questions_are_answered(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    visit(browser, &cluster, "").await?;
    browser.until_text("Idle but held").await?;
    let titles = "[...document.querySelectorAll('.figure-card h2')].map(title => title.innerText).join()";
    let expected = "Pods waiting,Problems,Idle but held,Allocated,Used,Free capacity";
    browser.until(&format!("{titles} === '{expected}'")).await?;
    // How full: allocated and used, with their history.
    browser
        .until("document.querySelector('svg.spark .held') && document.querySelector('svg.spark .used')")
        .await?;
    // Who holds what.
    browser.until_text("Usage by namespace").await?;
    // Who wastes what they hold.
    browser
        .until("document.querySelector('.waste tbody th').innerText.includes('team-vision/detector-train-1')")
        .await?;
    browser.click(".figure-card[href*='waste?state=idle']").await?;
    browser.until("location.hash === '#/waste?state=idle'").await?;
    browser.until("document.querySelectorAll('.waste tbody tr').length === 2").await?;
    // Why does my pod wait: kube-scheduler's own word comes first, and the pod is never said to fit.
    let path = "/api/v1/namespaces/team-lab/pods/sweep-7/status";
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/16 nodes are available: 16 Insufficient ephemeral-storage.", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    cluster
        .api
        .patch(path, &json!({"status": {"phase": "Pending", "conditions": [condition]}}))
        .map_err(|problem| anyhow::anyhow!("{problem}"))?;
    visit(browser, &cluster, "#/pods?state=waiting").await?;
    browser.until_text("16 Insufficient ephemeral-storage").await?;
    visit(browser, &cluster, "#/pod/team-lab/sweep-7").await?;
    browser
        .until("document.querySelector('.explanation p').innerText.startsWith('kube-scheduler: 0/16 nodes are available')")
        .await?;
    let fits = browser.eval("/\\bfits\\b/i.test(document.querySelector('main').innerText)").await?;
    ensure!(fits == json!(false), "the pod waits");
    Ok(())
}

/// Nothing is free on a node that gets no new pods, and the pages say why.
async fn nodes_without_new_pods_are_marked(browser: &Browser) -> Result<()> {
    let mut cordoned = node("t1", T4);
    cordoned["spec"] = json!({"unschedulable": true});
    let mut partly = node("h1", H100);
    partly["metadata"]["annotations"]["tessera.dev/gpu-cordon"] = "GPU-h1-0003".into();
    let cluster = Cluster::start([partly, cordoned]).await?;
    visit(browser, &cluster, "#/overview").await?;
    browser.until_text("without 1 node and 1 GPU that get no new pods").await?;
    // A cordoned GPU works, so it is no problem.
    browser.until_text("0 unhealthy, 0 overbooked").await?;
    let free = H100.gpu_count - 1;
    browser.until_text(&format!("of {free} free GPUs")).await?;
    visit(browser, &cluster, "#/nodes").await?;
    browser.until("document.querySelector('[data-key=t1] .chip.warn').innerText === 'cordoned'").await?;
    browser.until("!document.querySelector('[data-key=h1] .chip.warn')").await?;
    browser.until("document.querySelectorAll('[data-key=h1] .tile.withheld').length === 1").await?;
    browser.until("document.querySelectorAll('.tile.unhealthy').length === 0").await?;
    visit(browser, &cluster, "#/node/t1").await?;
    browser.until("document.querySelector('.page-head .chip.warn').innerText === 'cordoned'").await
}

/// A guarantee of the namespace does not hide that no scheduler has looked at the pod.
async fn a_pod_of_another_scheduler_says_so(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    let mut foreign = pod("team-vision", "foreign", whole(1));
    foreign["spec"]["schedulerName"] = "other".into();
    cluster.make(&foreign)?;
    visit(browser, &cluster, "#/pod/team-vision/foreign").await?;
    browser.until_text("its schedulerName is other").await?;
    browser.until_text("namespace team-vision holds").await
}

/// What a gang lacks is said, and every reason of a decision has a text.
async fn a_waiting_gang_is_explained(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    let mut member = pod("team", "train-0", whole(2));
    member["metadata"]["annotations"] = json!({"tessera.dev/gang": "train/2"});
    cluster.run(&member).await?;
    visit(browser, &cluster, "#/pod/team/train-0").await?;
    browser.until_text("gang team/train: 1 of 2 pods exist, 0 have nodes").await?;
    browser.until_text("gang waits").await
}

/// Resources that kube-scheduler counts itself are shown with their pods, waiting or not, and so are reservations.
async fn instances_and_reservations_are_shown(browser: &Browser) -> Result<()> {
    let mut mig = node("mig", H100);
    mig["status"]["allocatable"]["nvidia.com/mig-1g.10gb"] = "1".into();
    let reservation = json!([{"name": "maintenance", "owner": "jane", "until": "2999-01-02T03:04:05Z", "gpus": [{"uuid": "GPU-mig-0007"}]}]);
    mig["metadata"]["annotations"]["tessera.dev/reservations"] = reservation.to_string().into();
    let cluster = Cluster::start([mig, node("t1", T4)]).await?;
    let limits = json!({"nvidia.com/mig-1g.10gb": "1"});
    let mut holder = pod("team", "holder", limits.clone());
    holder["spec"]["nodeName"] = "mig".into();
    cluster.make(&holder)?;
    cluster.make(&pod("team", "waits", limits))?;
    visit(browser, &cluster, "#/node/mig").await?;
    browser.until_text("1 of 1 nvidia.com/mig-1g.10gb team/holder").await?;
    browser.until_text("maintenance: 1 GPU · jane").await?;
    browser.until("document.querySelector('#gpu-7 h3 .chip').innerText === 'Reserved'").await?;
    browser.click("a[href='#/pod/team/holder']").await?;
    browser.until_text("1 nvidia.com/mig-1g.10gb").await?;
    browser.until_text("kube-scheduler chose the node").await?;
    visit(browser, &cluster, "#/pod/team/waits").await?;
    browser.until_text("node has 0 of 1 nvidia.com/mig-1g.10gb left, and the pod requests 1").await?;
    visit(browser, &cluster, "#/pods").await?;
    browser.until("document.querySelectorAll('.pod-row .asks .chip').length === 2").await?;
    let wrong = browser.eval("/no node offers|fits/i.test(document.querySelector('main').innerText)").await?;
    ensure!(wrong == json!(false), "a node offers the instances, and the pod waits");
    Ok(())
}

async fn a_placed_pod_says_why(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    cluster.run(&pod("team", "half", share(50, 4_096))).await?.context("there is room")?;
    visit(browser, &cluster, "#/pod/team/half").await?;
    browser.until_text("Where it is, and why").await?;
    browser.until_text("On node").await?;
    // The reason comes from the pod's annotations, so it outlives the log of decisions.
    let reason = "document.querySelector('.explanation p:nth-child(2)').innerText";
    browser.until(&format!("{reason}.length > 10 && !{reason}.includes('does not say')")).await
}

async fn waste_is_sorted_and_filtered_by_the_address(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    visit(browser, &cluster, "#/waste?namespace=team-vision&sort=pod").await?;
    browser.until("document.querySelectorAll('.waste tbody tr').length > 2").await?;
    let names = "[...document.querySelectorAll('.waste tbody th a')].map(name => name.innerText)";
    browser.until(&format!("{names}.every(name => name.startsWith('team-vision/'))")).await?;
    browser.until(&format!("{names}.join() === {names}.toSorted().join()")).await?;
    browser.click(".waste thead th:nth-child(5) a").await?;
    browser.until("location.hash.includes('sort=wasted')").await?;
    browser.until(&format!("{names}[0] === 'team-vision/detector-train-1'")).await?;
    let heading = "document.querySelector('.waste thead th:nth-child(5)')";
    browser
        .until(&format!("{heading}.ariaSort === 'descending' && {heading}.innerText.endsWith('▼')"))
        .await?;
    // The sorted column reverses its order.
    browser.click(".waste thead th:nth-child(5) a").await?;
    browser.until("location.hash.includes('reversed=true')").await?;
    browser.until(&format!("{names}.at(-1) === 'team-vision/detector-train-1'")).await?;
    browser
        .until(&format!("{heading}.ariaSort === 'ascending' && {heading}.innerText.endsWith('▲')"))
        .await?;
    browser.until_text("is unknown and not shown").await
}

async fn what_if_explains_and_changes_nothing(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "#/what-if").await?;
    browser.click("button[type=submit]").await?;
    browser.until_text("Fits on 4 of 4 nodes.").await?;
    let chip = browser.eval("document.querySelector('.places .chip').textContent").await?;
    ensure!(chip == "GPU 0", "no container was named: {chip}");
    let choose = |kind: &str| {
        format!(
            "(() => {{ const kind = document.querySelector('[name=kind]'); kind.value = '{kind}'; kind.dispatchEvent(new Event('change')); return true; }})()"
        )
    };
    browser.eval(&choose("share")).await?;
    browser.eval("document.querySelector('[name=\"tencent.com/vcuda-memory\"]').value = '200'").await?;
    browser.click("button[type=submit]").await?;
    browser.until_text("Fits on 1 of 4 nodes.").await?;
    browser.until_text("no GPU has 51200 MiB").await?;
    browser.eval(&choose("manifest")).await?;
    browser.eval("document.querySelector('textarea').value = '{ not json'").await?;
    browser.click("button[type=submit]").await?;
    browser.until_text("the body is not a pod manifest in JSON").await?;
    ensure!(cluster.api.list("/api/v1/pods").is_empty());
    // The browser logs the refused request as an error, which is expected.
    let complaints = browser.complaints().await?;
    ensure!(complaints.iter().all(|line| line.contains("what-if") && line.contains("400")), "{complaints:?}");
    Ok(())
}

async fn filters_are_stored_in_the_address(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    visit(browser, &cluster, "#/nodes?model=Tesla+T4").await?;
    browser.until_text("6 nodes").await?;
    browser.until("document.querySelector('[name=model]').value === 'Tesla T4'").await?;
    browser.eval("(() => { const q = document.querySelector('.filters [name=q]'); q.value = 't4-03'; q.dispatchEvent(new Event('input')); return true; })()").await?;
    browser.until_text("1 node").await?;
    browser.until("location.hash === '#/nodes?model=Tesla+T4&q=t4-03'").await?;
    visit(browser, &cluster, "#/nodes?state=trouble").await?;
    browser.until_text("1 node").await?;
    browser
        .until("document.querySelector('.tile.unhealthy').getAttribute('aria-label').includes('unhealthy')")
        .await?;
    // A number of the overview leads to its list of nodes.
    visit(browser, &cluster, "").await?;
    browser.until("document.querySelector('.grade a')").await?;
    let nodes = browser.eval("document.querySelector('.grade a').innerText").await?;
    browser.click(".grade a").await?;
    let nodes = nodes.as_str().unwrap_or_default().to_owned();
    browser.until_text(&format!("{nodes} node")).await
}

async fn both_themes_apply(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    let ground = "getComputedStyle(document.body).backgroundColor";
    let (light, dark) = ("rgb(244, 246, 248)", "rgb(17, 21, 26)");
    visit(browser, &cluster, "").await?;
    browser.until(&format!("{ground} === '{light}'")).await?;
    browser.prefer("dark").await?;
    browser.until(&format!("{ground} === '{dark}'")).await?;
    browser.click("#theme").await?;
    browser.until(&format!("{ground} === '{light}'")).await?;
    visit(browser, &cluster, "").await?;
    browser.until(&format!("{ground} === '{light}'")).await?;
    browser.click("#theme").await?;
    browser.prefer("light").await?;
    browser.until(&format!("{ground} === '{dark}' && document.activeElement.id === 'theme'")).await?;
    browser.eval("localStorage.clear()").await.map(drop)
}

async fn both_languages_apply(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "").await?;
    browser.until("document.documentElement.lang === 'en'").await?;
    browser.eval("(() => { const choice = document.getElementById('language'); choice.value = 'zh'; choice.dispatchEvent(new Event('change')); return true; })()").await?;
    browser
        .until("document.documentElement.lang === 'zh' && document.querySelector('h1')?.innerText === '总览'")
        .await?;
    visit(browser, &cluster, "#/what-if").await?;
    browser.until_text("检查所有节点").await?;
    browser.eval("localStorage.clear()").await?;
    // A browser that prefers Chinese gets the Chinese texts.
    let agent = browser.eval("navigator.userAgent").await?;
    let wish = |languages: &str| json!({"userAgent": agent, "acceptLanguage": languages});
    browser.cdp("Network.setUserAgentOverride", wish("zh-CN,zh")).await?;
    visit(browser, &cluster, "#/quota").await?;
    browser.until("document.querySelector('h1')?.innerText === '配额'").await?;
    browser.cdp("Network.setUserAgentOverride", wish("fr-FR,fr")).await?;
    visit(browser, &cluster, "#/quota").await?;
    browser.until("document.querySelector('h1')?.innerText === 'Quota'").await?;
    browser.until_text("Guaranteed: 2 GPUs").await?;
    browser.cdp("Network.setUserAgentOverride", wish("en-US,en")).await.map(drop)
}

async fn the_keyboard_reaches_everything(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "#/nodes").await?;
    browser.until("document.querySelectorAll('.tile').length === 24").await?;
    let mut reached: Vec<String> = Vec::new();
    for _ in 0..60 {
        browser.press(&[TAB]).await?;
        let focused = browser.eval("(() => { const at = document.activeElement; return [at.getAttribute('aria-label') || at.name || at.innerText || at.tagName, getComputedStyle(at).outlineStyle, at.tagName]; })()").await?;
        ensure!(focused[1] != "none" || focused[2] == "BODY", "focus does not show on {focused}");
        reached.push(focused[0].as_str().unwrap_or_default().to_owned());
    }
    ensure!(reached[0] == "Skip to the content", "{reached:?}");
    for wanted in ["Overview", "Decisions", "Language", "namespace", "h1", "t2", "GPU 3: compute 0%"] {
        ensure!(
            reached.iter().any(|name| name == wanted || name.starts_with(wanted)),
            "{wanted} was not reached: {reached:#?}"
        );
    }
    visit(browser, &cluster, "").await?;
    browser.press(&[TAB, ENTER]).await?;
    browser.until("document.activeElement.tagName === 'MAIN'").await?;
    browser.eval("document.querySelector('.top nav a[data-page=quota]').focus()").await?;
    browser.press(&[ENTER]).await?;
    browser.until("document.querySelector('h1')?.innerText === 'Quota' && document.querySelector('[aria-current]').innerText === 'Quota'").await
}

/// Checks that every control has a name, that there is one main landmark, and that text has a
/// contrast of at least 4.5 to 1, or 3 to 1 if large.
const AUDIT: &str = r"(() => {
  const faults = [];
  const named = (element) => element.getAttribute('aria-label') || element.labels?.length || element.textContent?.trim() || element.title;
  for (const element of document.querySelectorAll('a, button, input, select, textarea, canvas, svg[role=img]'))
    if (!named(element)) faults.push('no name: ' + element.outerHTML.slice(0, 120));
  for (const [selector, count] of [['main', 1], ['header', 1], ['h1', 1]])
    if (document.querySelectorAll(selector).length !== count) faults.push(`${document.querySelectorAll(selector).length} of ${selector}`);
  for (const image of document.querySelectorAll('img')) if (!image.hasAttribute('alt')) faults.push('no alt');
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1); const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const ground = (element) => { const own = rgba(getComputedStyle(element).backgroundColor); return own[3] >= 0.99 || !element.parentElement ? own : over(own, ground(element.parentElement)); };
  const light = (color) => { const [r, g, b] = color.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest('svg, option, .skip, noscript')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(style.color)), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (ratio < least) faults.push(`contrast ${ratio.toFixed(2)}: ${element.className} ${walker.currentNode.data.slice(0, 40)}`);
  }
  return [...new Set(faults)];
})()";

async fn pages_pass_the_accessibility_audit(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    for scheme in ["light", "dark"] {
        browser.prefer(scheme).await?;
        for page in PAGES {
            visit(browser, &cluster, page).await?;
            browser.until("document.querySelectorAll('main .card').length > 0").await?;
            let faults = browser.eval(AUDIT).await?;
            ensure!(faults == json!([]), "{scheme} {page}: {faults:#}");
        }
    }
    Ok(())
}

/// Returns the texts of chips that begin or end outside the screen, and that no user can scroll to.
const CUT_CHIPS: &str = "[...document.querySelectorAll('main .chip')]
    .filter((chip) => !chip.closest('.scroll') && chip.getBoundingClientRect().right > innerWidth)
    .map((chip) => chip.textContent)";

async fn pages_fit_narrow_screens(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    browser.size(375, 812).await?;
    for page in PAGES {
        visit(browser, &cluster, page).await?;
        browser.until("document.querySelectorAll('main .card').length > 0").await?;
        let wide = browser.eval("document.documentElement.scrollWidth").await?;
        ensure!(wide.as_u64().is_some_and(|wide| wide <= 375), "{page} is {wide} wide");
    }
    // The page proposes a smaller request in a long vocabulary.
    visit(browser, &cluster, "#/pod/team-lab/sweep-7").await?;
    browser.until("[...document.querySelectorAll('main .chip')].some((chip) => chip.textContent.includes('vcuda-memory'))").await?;
    let cut = browser.eval(CUT_CHIPS).await?;
    ensure!(cut == json!([]), "the page cuts {cut}");
    Ok(())
}

async fn markup_in_names_is_shown_as_text(browser: &Browser) -> Result<()> {
    const EVIL: &str = "<img src=x onerror=window.hacked=1>";
    const KIND: Kind = Kind { model: EVIL, ..T4 };
    let mut labelled = node("evil", KIND);
    labelled["metadata"]["annotations"]["NODE_TYPE"] = EVIL.into();
    let mut unreadable = node("unread", T4);
    unreadable["metadata"]["annotations"]["tessera.dev/inventory"] =
        json!({"memoryUnit": EVIL, "gpus": []}).to_string().into();
    let cluster = Cluster::start([labelled, unreadable]).await?;
    let mut odd = pod("team", "odd", whole(1));
    odd["metadata"]["annotations"] = json!({"tessera.dev/policy": EVIL});
    let odd = cluster.make(&odd)?;
    cluster.schedule(&odd).await?;
    let mut container = pod("team", "container", share(50, 1_024));
    container["spec"]["containers"][0]["name"] = EVIL.into();
    cluster.run(&container).await?;
    // A real API server rejects such a namespace, but a client of the scheduler could send it.
    let spaced = json!({"Pod": {"metadata": {"name": EVIL, "namespace": EVIL, "uid": "u"}, "spec": odd["spec"]}, "NodeNames": ["evil"]});
    cluster.post("/scheduler/filter", &spaced).await?;
    let pages = [
        ("#/overview", EVIL),
        ("#/nodes", EVIL),
        ("#/node/evil", EVIL),
        ("#/node/unread", EVIL),
        ("#/pod/team/odd", EVIL),
        ("#/pod/team/container", EVIL),
        ("#/decisions", EVIL),
        ("#/pods?q=%3Cimg%20src%3Dx%3E", "No pod matches"),
    ];
    for (page, text) in pages {
        visit(browser, &cluster, page).await?;
        browser.until_text(text).await?;
        let fooled =
            browser.eval("[window.hacked ?? null, document.querySelectorAll('img[src=x]').length]").await?;
        ensure!(fooled == json!([null, 0]), "{page} took text for markup: {fooled}");
    }
    Ok(())
}

async fn foreign_scripts_and_styles_are_blocked(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "").await?;
    let attempts = "(() => { const script = document.createElement('script'); script.textContent = 'window.inline = 1'; document.body.append(script);
        const style = document.createElement('p'); style.setAttribute('style', 'color: red'); document.body.append(style);
        return [window.inline ?? null, getComputedStyle(style).color === 'rgb(255, 0, 0)']; })()";
    ensure!(browser.eval(attempts).await? == json!([null, false]));
    let complaints = browser.complaints().await?;
    ensure!(
        complaints.len() == 2 && complaints.iter().all(|line| line.contains("Content Security Policy")),
        "{complaints:?}"
    );
    for method in ["PUT", "DELETE", "PATCH", "POST"] {
        let (code, _) = request(&cluster.replica.authority, method, "/api/v1/nodes", None).await?;
        ensure!(code == 405, "{method}: {code}");
    }
    Ok(())
}

async fn unmeasured_usage_is_not_shown_as_zero(browser: &Browser) -> Result<()> {
    let gpus = json!([{"uuid": "GPU-with-0000", "index": 0, "memoryUsedMiB": 5120, "busyPercent": 42.0}, {"uuid": "GPU-with-0001", "index": 1}]);
    let container = json!({"namespace": "team", "pod": "p", "uid": "u", "container": "main",
        "gpus": [{"uuid": "GPU-with-0000", "index": 0, "memoryUsedMiB": 5000, "throttledPercent": 12.5}]});
    let mut with = node("with", T4);
    with["metadata"]["annotations"]["tessera.dev/agent"] =
        agent(json!({"gpus": gpus, "containers": [container]})).await?.into();
    let mut gone = node("without", T4);
    gone["metadata"]["annotations"]["tessera.dev/agent"] = "http://127.0.0.1:9".into();
    let cluster = Cluster::start([with, gone]).await?;
    let made = cluster.make(&pod("team", "p", memory(8)))?;
    cluster.bind(&made, "with").await?;
    visit(browser, &cluster, "#/node/with").await?;
    browser.until_text("In use now: 5 GiB · 42% busy").await?;
    browser.until("document.querySelector('#gpu-1').innerText.includes('In use now: not measured')").await?;
    visit(browser, &cluster, "#/pod/team/p").await?;
    browser.until_text("In use now: 4.9 GiB · waited for its share 12.5% of the time").await?;
    visit(browser, &cluster, "#/node/without").await?;
    browser.until_text("Not measured: the agent at 127.0.0.1:9 cannot be reached").await?;
    let zero = browser.eval("document.querySelector('#gpu-0').innerText.includes('0% busy')").await?;
    ensure!(zero == json!(false));
    // Without any measurement, the number of idle pods is unknown, too.
    let mut silent = node("silent", T4);
    silent["metadata"]["annotations"]["tessera.dev/agent"] = "http://127.0.0.1:9".into();
    let cluster = Cluster::start([silent]).await?;
    let made = cluster.make(&pod("team", "held", memory(8)))?;
    cluster.bind(&made, "silent").await?;
    visit(browser, &cluster, "").await?;
    browser.until_text("1 placed").await?;
    let idle = "document.querySelector('.figure-card[href*=\"waste?state=idle\"]').innerText.split('\\n')";
    browser.until(&format!("{idle}.includes('–') && !{idle}.includes('0')")).await?;
    browser.until(&format!("{idle}.includes('No agent reports the use of a pod.')")).await?;
    let none = browser.eval("document.body.innerText.includes('No pod wastes what it holds')").await?;
    ensure!(none == json!(false));
    Ok(())
}

async fn a_lost_connection_is_restored(browser: &Browser) -> Result<()> {
    let mut cluster = small().await?;
    visit(browser, &cluster, "").await?;
    browser.until("document.querySelector('.live').innerText === 'Live'").await?;
    cluster.replica.hang_up();
    browser.until("document.querySelector('.live').innerText === 'Connection lost, trying again'").await?;
    // The page keeps its data while the connection is lost.
    browser.until("document.querySelectorAll('.figure-card').length === 6").await?;
    cluster.make(&pod("team", "meanwhile", whole(1)))?;
    cluster.replica.answer_again()?;
    browser.until("[...document.querySelectorAll('.figure-card')].find(card => card.innerText.startsWith('Pods waiting'))?.querySelector('.value').innerText === '1'").await?;
    browser.until("document.querySelector('.live').innerText === 'Live'").await?;
    // The browser logs the broken connections as errors, which is expected.
    browser.complaints().await.map(drop)
}

async fn a_follower_names_the_leader(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    let follower = Replica::start(&cluster.api, "scheduler-1").await?;
    browser.open(&follower.url("")).await?;
    browser.until_text("Another replica leads").await?;
    browser.until_text("The leader is scheduler-0.").await?;
    // The browser logs the 503 answers as errors, which is expected.
    let complaints = browser.complaints().await?;
    ensure!(complaints.iter().all(|line| line.contains("503")), "{complaints:?}");
    Ok(())
}

async fn a_token_logs_in_and_out(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    let reviews = ReviewServer::start().await?;
    reviews
        .add("e30.e30.reader", KnownToken { user: "jane", audience: None, paths: &[page_rights::DASHBOARD] });
    let url = cluster.replica.with_login(reviews.url()).await?;
    let send = async |token: &str| {
        browser.until("document.querySelector('#token')").await?;
        browser.eval(&format!("document.querySelector('#token').value = '{token}'")).await?;
        browser.click("button[type=submit]").await
    };
    browser.open(&url).await?;
    send("e30.e30.stranger").await?;
    browser.until_text("the API server does not accept").await?;
    send("e30.e30.reader").await?;
    browser.until("location.pathname === '/'").await?;
    browser.open(&format!("{url}login")).await?;
    browser.click("button.quiet").await?;
    browser.until("document.querySelector('#token')").await?;
    browser.open(&url).await?;
    browser.until("location.pathname === '/login'").await?;
    // The browser logs the 401 answer as an error, which is expected.
    let complaints = browser.complaints().await?;
    ensure!(complaints.iter().all(|line| line.contains("401")), "{complaints:?}");
    Ok(())
}

async fn a_thousand_nodes_need_few_elements(browser: &Browser) -> Result<()> {
    let cluster = Cluster::start((0..1000).map(|number| node(&format!("node-{number:04}"), H100))).await?;
    for number in 0..40 {
        let made = cluster.make(&pod("team", &format!("p{number}"), whole(8)))?;
        cluster.bind(&made, &format!("node-{:04}", 500 + number)).await?;
    }
    visit(browser, &cluster, "").await?;
    browser.until_text("1,000 nodes, 8,000 GPUs").await?;
    browser
        .until("document.querySelector('canvas').getAttribute('aria-label') === 'Map of 1,000 nodes'")
        .await?;
    let elements = "document.querySelectorAll('*').length";
    let overview = browser.eval(elements).await?;
    visit(browser, &cluster, "#/nodes").await?;
    browser.until_text("1,000 nodes").await?;
    let top = browser.eval(elements).await?;
    // While scrolling to the end and back, only visible nodes have elements.
    browser.eval("window.scrollTo(0, document.documentElement.scrollHeight)").await?;
    browser.until("document.querySelector('[data-key=node-0999]') && !document.querySelector('[data-key=node-0000]')").await?;
    let end = browser.eval(elements).await?;
    let frames = "(async () => { const gaps = []; let last = performance.now(); for (let y = 0; y < 60; y += 1) { window.scrollTo(0, y * 400); await new Promise(requestAnimationFrame); gaps.push(performance.now() - last); last = performance.now(); } gaps.sort((a, b) => a - b); return [gaps[30], gaps[59]].map(Math.round); })()";
    let frames = browser.eval(frames).await?;
    let counts = [&overview, &top, &end].map(|count| count.as_u64().unwrap_or(u64::MAX));
    println!(
        "        elements: overview {}, nodes {}, at the end {}; scrolling, ms a frame (median, worst): {frames}",
        counts[0], counts[1], counts[2]
    );
    ensure!(counts.iter().all(|count| *count < 3_000), "{counts:?} elements");
    // Live updates also work in a long list.
    browser.eval("window.scrollTo(0, 0)").await?;
    browser.until("document.querySelector('[data-key=node-0000]')").await?;
    let held = "document.querySelectorAll('[data-key=node-0003] .tile.held').length";
    ensure!(browser.eval(held).await? == json!(0));
    let seen = cluster.make(&pod("team", "seen", whole(1)))?;
    cluster.bind(&seen, "node-0003").await?;
    browser.until(&format!("{held} === 1")).await
}
