"""The page of a federation in a real browser: by keyboard alone, on a narrow screen, and while studies come."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.net.test_federation_page import write_rounds
from tests.unit.net.test_service import NAMES, Hall

from coterie.net.federation_page import FederationPage

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402 (after the check)
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture
def hall(tmp_path: Path, port: int) -> Iterator[Hall]:
    made = Hall(tmp_path, port)
    yield made
    made.close()


def tab_to(browser, name: str) -> None:
    """Press the tabulator until an element has the focus, and then the return key."""
    for _ in range(40):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.execute_script("return document.activeElement.id") == name:
            ActionChains(browser).send_keys(Keys.ENTER).perform()
            return
    raise AssertionError(f"{name} is not reached by the tabulator")


def wait_for(browser, text: str) -> None:
    # The page may be drawn again between finding its main part and reading it.
    WebDriverWait(browser, 30, ignored_exceptions=[StaleElementReferenceException]).until(
        lambda driver: text in driver.find_element(By.TAG_NAME, "main").text, text
    )


def test_a_study_comes_is_looked_at_and_approved_by_keyboard_on_a_narrow_screen(browser, hall):
    for name in NAMES:
        hall.open(name)
    membership = hall.membership("south")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        with FederationPage(membership) as page:
            browser.get("about:blank")
            browser.get_log("browser")
            browser.get(page.address)
            wait_for(browser, "None was proposed yet")
            hall.propose("hearts-of-three", quorum=2)
            hall.exchange("south")
            # Without a reload.
            wait_for(browser, "hearts-of-three")
            wide = "return document.documentElement.scrollWidth"
            assert browser.execute_script(wide) == 375
            tab_to(browser, "review-hearts-of-three")
            wait_for(browser, "56 bytes of numbers")
            assert browser.execute_script(wide) == 375
            tab_to(browser, "approve-hearts-of-three")
            wait_for(browser, "2 of 2 approved")
            membership.ledger.reload()
            entry = membership.ledger.entries["hearts-of-three"]
            assert entry.says("approval", "south")

            write_rounds(entry.folder / "south/hearts-of-three/DAC/seed-0", {"loss": [0.9, 0.4]})
            wait_for(browser, "loss 0.9 → 0.4")
            faults = [one["message"] for one in browser.get_log("browser")]
            assert [one for one in faults if "favicon" not in one] == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
