//! The embedded API server answers like a real one. `e2e/run conformance` runs the same requests
//! there.

use tessera_sim::apiserver::{ApiServer, conformance};
use tessera_sim::http::HttpClient;

#[tokio::test]
async fn the_embedded_server_answers_like_a_real_one() {
    let server = ApiServer::start().await.unwrap();
    let mut client = HttpClient::new(&server.url()).unwrap();
    let tried = conformance::run(async |request: conformance::ConformanceRequest| {
        let headers = [("accept", request.accept.as_str()), ("content-type", request.media.as_str())];
        client.send(&request.method, &request.path, &headers, request.body).await
    })
    .await;
    match tried {
        Ok(steps) => assert!(steps > 60, "only {steps} steps"),
        Err(error) => panic!("{error}"),
    }
}
