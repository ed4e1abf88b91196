//! The node's type, as the metadata service of a cloud tells it.

use std::time::Duration;

use tessera_cluster::fetch::Fetcher;

/// A metadata service is on the same machine or beside it: one that has not answered by then will not.
const WITHIN: Duration = Duration::from_secs(2);

/// Much more than any name.
const LARGEST: usize = 65_536;

/// What the service at this URL answers, if it does.
pub(super) async fn ask(url: &str) -> Option<String> {
    let answer = Fetcher::new(WITHIN).with_max_bytes(LARGEST).get(url).await;
    let found = answer.map_err(|error| error.to_string()).and_then(|text| read(&text));
    found.inspect_err(|why| tracing::warn!("no instance type from {url}: {why}")).ok()
}

/// A page of HTML, or several lines, are no name.
fn read(answer: &str) -> Result<String, String> {
    let name = answer.trim();
    let is_name = !name.is_empty() && name.len() < 256 && !name.contains(['\n', '<']);
    let begin = || name.chars().take(100).collect::<String>();
    if is_name { Ok(name.to_owned()) } else { Err(format!("it answered {:?}", begin())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_one_line() {
        assert_eq!(read("ecs.gn6v-c10g1.20xlarge\n").as_deref(), Ok("ecs.gn6v-c10g1.20xlarge"));
        for wrong in ["", " \n", "<html></html>", "one\ntwo", &"x".repeat(300)] {
            assert!(read(wrong).is_err_and(|why| why.starts_with("it answered")), "{wrong}");
        }
    }
}
