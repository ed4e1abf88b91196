//! The instance type of the node, from the metadata service of a cloud.

use std::time::Duration;

use anyhow::{Result, ensure};
use tessera_cluster::fetch::Fetcher;

/// Timeout of the request. A metadata service is on the same host or network segment, so a later
/// answer is not expected.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Largest accepted answer in bytes, much more than any name.
const MAX_ANSWER_BYTES: usize = 65_536;

/// Returns the answer of the service at this URL, if there is one.
pub(super) async fn fetch(url: &str) -> Option<String> {
    let answer = Fetcher::new(REQUEST_TIMEOUT).with_max_bytes(MAX_ANSWER_BYTES).get(url).await;
    let found = answer.map_err(anyhow::Error::from).and_then(|text| read(&text));
    let log = |error: &anyhow::Error| {
        tracing::warn!(url, error = %format!("{error:#}"), "cannot read the instance type; the node publishes none");
    };
    found.inspect_err(log).ok()
}

/// Reads the name in an answer. HTML and several lines are not a name.
fn read(answer: &str) -> Result<String> {
    let name = answer.trim();
    let is_name = !name.is_empty() && name.len() < 256 && !name.contains(['\n', '<']);
    ensure!(is_name, "the answer is not a name: {:?}", name.chars().take(100).collect::<String>());
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_type_is_one_line() {
        assert_eq!(read("ecs.gn6v-c10g1.20xlarge\n").unwrap(), "ecs.gn6v-c10g1.20xlarge");
        for wrong in ["", " \n", "<html></html>", "one\ntwo", &"x".repeat(300)] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
