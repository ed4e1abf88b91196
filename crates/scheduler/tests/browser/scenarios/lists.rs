//! Lists, forms in the address, and how pages are laid out.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{small, visit};
use crate::cluster::{Cluster, T4, V100, node, pod, share, whole};
use crate::pictures::sample;
use crate::webdriver::Browser;

/// Expression for the names of the nodes in the list, in the order in which they are shown.
const NODES: &str = "[...document.querySelectorAll('article.node')].sort((a, b) => a.parentElement.ariaPosInSet - b.parentElement.ariaPosInSet).map(card => card.dataset.key).join()";

pub(super) async fn lists_are_sorted_and_filtered(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    for name in ["p10", "p9"] {
        cluster.run_among("t2", &pod("team", name, whole(1))).await?.context("there is room")?;
    }
    cluster.run_among("h1", &pod("team", "half", share(50, 4_096))).await?.context("there is room")?;
    cluster.make(&pod("lab", "other", json!({"nvidia.com/gpumem": "4096", "nvidia.com/gpu": "1"})))?;
    let waits = cluster.make(&pod("lab", "waits", whole(9)))?;
    ensure!(cluster.schedule(&waits).await?.is_none(), "no node has nine GPUs");
    for (page, expected) in [
        ("#/nodes", "h1,t1,t2,v1"),
        ("#/nodes?sort=full", "t2,h1,t1,v1"),
        ("#/nodes?sort=free", "v1,h1,t1,t2"),
    ] {
        visit(browser, &cluster, page).await?;
        browser.until(&format!("{NODES} === '{expected}'")).await.with_context(|| page.to_owned())?;
    }
    visit(browser, &cluster, "#/nodes").await?;
    browser.eval("(() => { const sort = document.querySelector('.filters [name=sort]'); sort.value = 'free'; sort.dispatchEvent(new Event('change')); return true; })()").await?;
    browser.until("location.hash === '#/nodes?sort=free'").await?;
    browser.until(&format!("{NODES} === 'v1,h1,t1,t2'")).await?;
    // The order without a choice has a name, too.
    let usual = "document.querySelector('.filters [name=sort] option[value=\"\"]').innerText";
    visit(browser, &cluster, "#/nodes").await?;
    browser.until(&format!("{usual} === 'by name'")).await?;
    let mut foreign = pod("lab", "foreign", whole(1));
    foreign["spec"]["schedulerName"] = "other".into();
    cluster.make(&foreign)?;
    visit(browser, &cluster, "#/pods").await?;
    browser.until(&format!("{usual} === 'waiting first'")).await?;
    browser.until_text("kube-scheduler has not reported on the pod yet; its schedulerName is other").await?;
    visit(browser, &cluster, "#/pod/lab/foreign").await?;
    browser.until_text("kube-scheduler has not reported on the pod yet; its schedulerName is other").await?;
    // Pods are in the order in which people count.
    visit(browser, &cluster, "#/pods?namespace=team&sort=name").await?;
    let pods = "[...document.querySelectorAll('.slot')].sort((a, b) => a.ariaPosInSet - b.ariaPosInSet).map(row => row.querySelector('.name a').innerText).join()";
    browser.until(&format!("{pods} === 'team/half,team/p9,team/p10'")).await?;
    visit(browser, &cluster, "#/pods?dialect=hami").await?;
    browser.until(&format!("{pods} === 'lab/other'")).await?;
    browser.until("document.querySelector('.filters [name=dialect]').value === 'hami'").await?;
    // Decisions have filters of their own.
    visit(browser, &cluster, "#/decisions?outcome=fits-nowhere").await?;
    let decided = "[...document.querySelectorAll('.decisions .what > a')].map(link => link.innerText).join()";
    browser.until(&format!("{decided} === 'lab/waits'")).await?;
    browser.eval("(() => { const outcome = document.querySelector('.filters [name=outcome]'); outcome.value = 'bound'; outcome.dispatchEvent(new Event('change')); return true; })()").await?;
    browser.until(&format!("{decided}.includes('team/p10') && !{decided}.includes('lab/waits')")).await?;
    browser.eval("(() => { const pod = document.querySelector('.filters [name=pod]'); pod.value = 'p10'; pod.dispatchEvent(new Event('input')); return true; })()").await?;
    browser.until(&format!("{decided} === 'team/p10'")).await?;
    browser.until("location.hash.includes('outcome=bound') && location.hash.includes('pod=p10')").await?;
    visit(browser, &cluster, "#/decisions?pod=nothing").await?;
    browser.until_text("No decision matches the filter.").await
}

pub(super) async fn what_if_is_stored_in_the_address(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "#/what-if?kind=share&tencent.com%2Fvcuda-core=30&tencent.com%2Fvcuda-memory=200&namespace=team&policy=binpack").await?;
    // The request of a link is checked at once.
    browser.until_text("Fits on 1 of 4 nodes.").await?;
    let fields = "['kind', 'tencent.com/vcuda-core', 'tencent.com/vcuda-memory', 'namespace', 'cpu', 'policy'].map(name => document.querySelector(`[name=\"${name}\"]`).value).join()";
    browser.until(&format!("{fields} === 'share,30,200,team,,binpack'")).await?;
    browser.eval("(() => { const core = document.querySelector('[name=\"tencent.com/vcuda-core\"]'); core.value = '40'; core.dispatchEvent(new Event('change', { bubbles: true })); return true; })()").await?;
    browser.until("location.hash.includes('vcuda-core=40')").await?;
    browser.click("button[type=submit]").await?;
    browser.until_text("Fits on 1 of 4 nodes.").await?;
    ensure!(cluster.api.list("/api/v1/pods").is_empty());
    Ok(())
}

/// The map is painted on a canvas, so the test records the texts that it paints.
pub(super) async fn squares_of_the_map_have_labels(browser: &Browser) -> Result<()> {
    let names = ["gpu-pool-a-01", "gpu-pool-a-02", "gpu-pool-a-10"];
    // The only node of a model is told from the nodes of the others.
    let single = node("gpu-pool-b-07", V100);
    let cluster = Cluster::start(names.map(|name| node(name, T4)).into_iter().chain([single])).await?;
    let record = "window.painted = []; const paint = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) { window.painted.push(text); return paint.call(this, text, ...rest); };";
    let script = browser.cdp("Page.addScriptToEvaluateOnNewDocument", json!({"source": record})).await?;
    visit(browser, &cluster, "#/overview").await?;
    browser
        .until("['Tesla T4 (3)', '01', '02', '10', 'b-07'].every(text => window.painted.includes(text))")
        .await?;
    browser
        .cdp("Page.removeScriptToEvaluateOnNewDocument", json!({"identifier": script["identifier"]}))
        .await
        .map(drop)
}

pub(super) async fn bars_and_tiles_are_aligned(browser: &Browser) -> Result<()> {
    let cluster = sample().await?;
    visit(browser, &cluster, "#/waste").await?;
    browser.until("document.querySelectorAll('.waste .bar').length > 5").await?;
    let places = "[...new Set([...document.querySelectorAll('.waste .bar')].map(bar => Math.round(bar.getBoundingClientRect().left)))]";
    let places = browser.eval(places).await?;
    ensure!(places.as_array().is_some_and(|all| all.len() == 1), "bars begin at {places}");
    let cluster = small().await?;
    visit(browser, &cluster, "#/nodes").await?;
    browser.until("document.querySelectorAll('.tile').length === 24").await?;
    let heights = "[...new Set([...document.querySelectorAll('.tile')].map(tile => Math.round(tile.getBoundingClientRect().height)))]";
    let heights = browser.eval(heights).await?;
    let is_even = |all: &Vec<serde_json::Value>| {
        let all = || all.iter().filter_map(serde_json::Value::as_f64);
        all().fold(0.0, f64::max) < 1.2 * all().fold(f64::MAX, f64::min)
    };
    ensure!(heights.as_array().is_some_and(is_even), "tiles are {heights} high");
    Ok(())
}
