"""`make scan`: what the scanners report is read, and nothing of it passes without a reason, nor a reason without it."""

import scan
import yaml

CHECKOV = {
    "results": {
        "failed_checks": [
            {
                "check_id": "CKV_K8S_16",
                "check_name": "Container should not be privileged",
                "file_path": "/h200/all.yaml",
                "resource": "Deployment.serving.llm-mizzen",
            },
            {
                "check_id": "CKV2_K8S_6",
                "check_name": "Minimize the admission of pods which lack an associated NetworkPolicy",
                "file_path": "/h200/all.yaml",
                "resource": "Pod.serving.llm-mizzen-load-1.app.kubernetes.io/component-test",
            },
        ]
    }
}
TRIVY = {
    "Results": [
        {"Target": "cpu/all.yaml"},
        {
            "Target": "h200/all.yaml",
            "Misconfigurations": [
                {
                    "ID": "KSV017",
                    "Title": "Privileged",
                    "Message": "Container 'mizzen' of Deployment 'llm-mizzen' should set 'x' to false",
                }
            ],
        },
    ]
}


def test_reports_of_both_scanners_are_read() -> None:
    assert [(found.check, found.where, found.resource) for found in scan.checkov(CHECKOV)] == [
        ("CKV_K8S_16", "h200", "Deployment/llm-mizzen"),
        ("CKV2_K8S_6", "h200", "Pod/llm-mizzen-load-1"),
    ]
    assert list(scan.trivy(TRIVY)) == [scan.Finding("KSV017", "h200", "Deployment/llm-mizzen", "Privileged")]


def test_a_finding_needs_a_reason_that_fits_its_check_and_its_resource() -> None:
    (found,) = scan.trivy(TRIVY)
    reason = {"checks": "CKV_K8S_16 KSV017", "resources": "Deployment/.*", "reason": "because"}
    assert scan.judge([found], [reason]) == []
    for other in ({"checks": "KSV011"}, {"resources": "Pod/.*"}):
        missing, unused = scan.judge([found], [reason | other])
        assert missing == "h200: Deployment/llm-mizzen: KSV017 Privileged"
        assert "any more" in unused


def test_no_reason_covers_the_servers_own_security() -> None:
    for reason in yaml.safe_load(scan.REASONS.read_text()):
        assert len(reason["reason"]) > 40
        covers_all = reason["resources"] == ".*"
        assert not covers_all or set(reason["checks"].split()) <= {"CKV_K8S_11", "KSV011", "CKV_K8S_43", "CKV_K8S_15"}
