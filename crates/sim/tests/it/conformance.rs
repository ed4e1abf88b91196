//! The embedded API server answers as the real one does; `e2e/run conformance` tries the same there.

use tessera_sim::apiserver::{ApiServer, conformance};
use tessera_sim::http::HttpClient;

#[tokio::test]
async fn the_embedded_server_answers_as_a_real_one() {
    let server = ApiServer::start().await.unwrap();
    let mut client = HttpClient::new(&server.url()).unwrap();
    let tried = conformance::run(async |request: conformance::ConformanceRequest| {
        let headers = [("accept", request.accept.as_str()), ("content-type", request.media.as_str())];
        client.send(&request.method, &request.path, &headers, request.body).await
    })
    .await;
    match tried {
        Ok(steps) => assert!(steps > 60, "only {steps} steps"),
        Err(differences) => panic!("{differences}"),
    }
}
